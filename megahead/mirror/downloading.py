"""One checkpoint from a store to a disk: beside, verified, named by one rename, as a save does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from megahead.checkpoint import Checkpoint, step_folder
from megahead.checkpoint.folders import check_lengths, clear_remains, give_name, is_complete, partial_folder, set_aside
from megahead.checkpoint.integrity import check_files
from megahead.checkpoint.manifest import MANIFEST, Manifest
from megahead.errors import CheckpointError
from megahead.far import DamagedError, Expected, joined, receive
from megahead.files import fsync
from megahead.mirror.far_run import FarRun, write_all
from megahead.wording import gib

TELL_SECONDS = 10.0
"""Between two lines on how far it is."""


@dataclass(frozen=True)
class Terms:
    """On what terms a checkpoint is fetched."""

    accept: Callable[[Checkpoint], None] = lambda _: None
    """May refuse it before."""

    arrived: Callable[[], None] = lambda: None
    """Done when it is here, before it has its name."""

    keeps_others: bool = False
    """Whether a whole one with other content that has its place is set aside; else it is replaced."""

    @staticmethod
    def of_own(accept: Callable[[Checkpoint], None], files: Callable[[], dict[Path, bytes]]) -> Terms:
        """Those of one that becomes a run's own: small files come along. They are read before it, since all of it would
        have come in vain, and written when it is here; once it has its name it would not be fetched again."""
        brought: dict[Path, bytes] = {}

        def accept_and_read(found: Checkpoint) -> None:
            accept(found)
            brought.update(files())

        return Terms(accept_and_read, lambda: write_all(brought), keeps_others=True)


def download(far: FarRun, name: str, root: Path, terms: Terms) -> Iterator[None]:
    """Puts the checkpoint `name` into `root`, unless the same one is there undamaged; yields often. DamagedError where
    the store has not all of it; CheckpointError without room."""
    text, manifest = _manifest(far, name)
    final, partial = step_folder(root, manifest.step), partial_folder(root, manifest.step)
    terms.accept(Checkpoint(final, manifest))
    if (yield from _is_there(final, text, manifest)):
        terms.arrived()
        return
    root.mkdir(parents=True, exist_ok=True)
    clear_remains(root)
    _check_room(root, manifest)
    partial.mkdir()
    try:
        yield from _fetch_files(far, name, partial, manifest)
        (partial / MANIFEST).write_bytes(text)
        fsync(partial / MANIFEST)
        check_lengths(partial, manifest)
        terms.arrived()
        if terms.keeps_others and _is_another(final, manifest):
            set_aside([final])
        give_name(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _manifest(far: FarRun, name: str) -> tuple[bytes, Manifest]:
    try:
        return far.manifest(name)
    except CheckpointError as error:
        raise DamagedError(str(error)) from None
    except FileNotFoundError:
        raise DamagedError(f"`{joined(far.url, name)}` must stay while it is fetched, but was removed.") from None


def _fetch_files(far: FarRun, name: str, partial: Path, manifest: Manifest) -> Iterator[None]:
    total, before, told = sum(entry.bytes for entry in manifest.files.values()), 0, time.monotonic()
    for file, entry in manifest.files.items():
        with (partial / file).open("xb") as target:
            expected = Expected(entry.bytes, entry.sha256)
            for received in receive(far.store, f"{name}/{file}".lstrip("/"), expected, target.write):
                if time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    print(f"fetching {joined(far.url, name)}: {gib(before + received)} of {gib(total)}", flush=True)
                yield
        fsync(partial / file)
        before += entry.bytes


def _is_there(final: Path, text: bytes, manifest: Manifest) -> Generator[None, None, bool]:
    """Whether this very checkpoint is on disk, undamaged; reads all of it."""
    if not is_complete(final) or (final / MANIFEST).read_bytes() != text:
        return False
    try:
        yield from check_files(final, manifest.files)
    except CheckpointError:
        return False
    return True


def _is_another(final: Path, manifest: Manifest) -> bool:
    """Whether a whole checkpoint with other content has its place on disk: of another history, it may be missed."""
    return is_complete(final) and Manifest.read(final).files != manifest.files


def _check_room(root: Path, manifest: Manifest) -> None:
    needed, free = sum(entry.bytes for entry in manifest.files.values()), shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"`{root}` must have room for a checkpoint of {needed} bytes, but {needed - free} bytes are missing; free "
            "some."
        )
