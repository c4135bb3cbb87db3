"""Fetches checkpoints from an object store, verified, into a run's folder or this machine's cache."""

from __future__ import annotations

import fcntl
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megahead.checkpoints.disk import Disk, describe_failure, is_complete
from megahead.checkpoints.format import (
    MANIFEST,
    Manifest,
    check_files,
    check_lengths,
    run_long_on_all_ranks,
    run_on_all_ranks,
)
from megahead.checkpoints.reading import Checkpoint, Resumed, open_together
from megahead.checkpoints.remote import CHECKPOINTS, Remote, find_remote, lineage_in, newer_in, patience_with
from megahead.checkpoints.store import Latest, is_name, new_name, step_of
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.files import fsync, write_atomically
from megahead.remote_files import DamagedError, Expected, Store, folder_for, join_url, receive, with_progress
from megahead.run_folder import RunFolder

# One checkpoint from a store to a disk: beside, verified, named by one rename, as a save does.


@dataclass(frozen=True)
class Terms:
    """On what terms a checkpoint is fetched."""

    accept: Callable[[Checkpoint], None] = lambda _: None
    """May refuse it before."""

    files: Callable[[], dict[Path, bytes]] = dict
    """Small files that come along, where it becomes a run's own. They are read before it, since all of it would have
    come in vain, and written when it is here; once it has its name it would not be fetched again."""


def download(remote: Remote, name: str, disk: Disk, terms: Terms) -> Generator[None, None, str]:
    """Puts the checkpoint `name` on a disk, unless the same one is there undamaged; yields often. Returns its name
    there: another one only where an earlier version used it twice. DamagedError where the store has not all of it;
    CheckpointError without room."""
    try:
        text, manifest = remote.manifest_with_text(name)
    except CheckpointError as error:
        raise DamagedError(str(error)) from None
    terms.accept(Checkpoint(disk.root / name, manifest))
    files, here = terms.files(), _name_here(name, text, manifest, disk)
    if is_complete(disk.root / here) and (yield from _is_sound(disk.root / here, manifest)):
        _write_all(files)
        return here
    partial = disk.partial(here)
    try:
        disk.prepare(here, manifest.total_bytes)
        received, place = _fetch_files(remote, name, partial, manifest), join_url(remote.url, remote.place(name))
        yield from with_progress(received, place, manifest.total_bytes)
        (partial / MANIFEST).write_bytes(text)
        fsync(partial / MANIFEST)
        check_lengths(partial, manifest)
        _write_all(files)
        disk.publish(here)
    except OSError as error:
        raise CheckpointError(describe_failure(error, partial, manifest.total_bytes)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return here


def _name_here(name: str, text: bytes, manifest: Manifest, disk: Disk) -> str:
    """That of the same checkpoint where it is on disk, else its own, unless another has that."""
    for each in disk.names():
        folder = disk.root / each
        if step_of(each) == manifest.step and is_complete(folder) and (folder / MANIFEST).read_bytes() == text:
            return each
    return name if is_name(name) and not is_complete(disk.root / name) else new_name(manifest.step)


def _write_all(contents: Mapping[Path, bytes]) -> None:
    for path, content in contents.items():
        write_atomically(path, content)


def _fetch_files(remote: Remote, name: str, partial: Path, manifest: Manifest) -> Iterator[int]:
    """Yields the bytes of all files received so far."""
    before = 0
    for file, entry in manifest.files.items():
        with (partial / file).open("xb") as target:
            expected = Expected(entry.bytes, entry.sha256)
            for received in receive(remote.store, remote.place(name, file), expected, target.write):
                yield before + received
        fsync(partial / file)
        before += entry.bytes


def _is_sound(folder: Path, manifest: Manifest) -> Generator[None, None, bool]:
    """Whether all its files are as recorded; reads them."""
    try:
        yield from check_files(folder, manifest.files)
    except CheckpointError:
        return False
    return True


# Which checkpoint of a store a session goes on from, and that all ranks have it.


_ALONE, _ANY = Group(), Terms()


def fetch_newer(
    than: int, url: str, folder: RunFolder, group: Group, accept: Callable[[Checkpoint], None]
) -> Resumed | None:
    """Fetches the newest sound checkpoint of the history at `url` into `folder`, with the log up to there and what the
    run is known by, if one is newer than step `than` (see `newer_in`); None if none is. Collective; CheckpointError
    where the store cannot be read.

    `accept` may refuse one before it is fetched, on rank 0. Not counted is what the run in `folder` went back from.
    """
    began = time.monotonic()

    def newer() -> tuple[Remote, list[str]]:
        remote = Remote.of(url, patience_with(group))
        return remote, newer_in(remote, folder, than)

    terms = Terms(accept, lambda: small_files(url, group, folder.metrics, folder.identity))
    final, damage = _fetch_first(newer, Disk(folder.checkpoints), group, terms)
    if final is not None:
        run_on_all_ranks(group, lambda: _point_to(final) if group.rank == 0 else None)
        checkpoint, seconds = open_together(final, group), time.monotonic() - began
        sentence = f"step {checkpoint.step:,} from {url} in {seconds:.1f} s"
        details = {"fetched": checkpoint.step, "seconds": round(seconds, 3)}
        return Resumed("mirror", checkpoint, damage, sentence, details)
    return Resumed("mirror", None, damage) if damage else None


def _point_to(folder: Path) -> None:
    Disk(folder.parent).point_to(Latest(folder.name, Manifest.read(folder).parents))


def small_files(url: str, group: Group, *paths: Path) -> dict[Path, bytes]:
    """What small files of the run at `url` hold, by their names, as far as they are there."""
    store = Store(url, patience_with(group))
    found = {path: store.read_if_there(path.name) for path in paths}
    return {path: content for path, content in found.items() if content is not None}


def fetch_named(url: str, into: RunFolder, group: Group = _ALONE, terms: Terms = _ANY) -> Path:
    """Fetches the checkpoint that a URL means (see `find_remote`; the newest sound one of a run, but for those that the
    run in `into` went back from) into `into`, and returns its folder; one that is there already is not fetched again.
    Which checkpoint there is the newest stays as it was, and newer ones that are damaged are reported. Collective;
    CheckpointError where none can be had."""

    def named() -> tuple[Remote, list[str]]:
        remote, names = find_remote(url, patience_with(group))
        passed = lineage_in(into).orphaned if len(names) > 1 else ()
        return remote, [name for name in names if name not in passed]

    final, damage = _fetch_first(named, Disk(into.checkpoints), group, terms)
    if final is None:
        raise CheckpointError(
            f"`{url}` must be a checkpoint, or the folder of a run that has one, but holds none that is sound"
            f"{': ' if damage else '.'}{' '.join(damage)}"
        )
    for each in damage if group.rank == 0 else ():
        print(f"passed over: {each}", file=sys.stderr, flush=True)
    return final


def _fetch_first(
    find: Callable[[], tuple[Remote, list[str]]], disk: Disk, group: Group, terms: Terms
) -> tuple[Path | None, list[str]]:
    """The folder of the first sound one of those that rank 0 finds and fetches, and a sentence for each before it. It
    looks again after each of these: a session that still sends may have removed it for a newer one."""
    fetched, problems = list[str](), list[str]()

    def fetch() -> Iterator[None]:
        tried = set[str]()
        while not fetched:
            remote, names = find()
            yield
            name = next((name for name in names if name not in tried), None)
            if name is None:
                return
            tried.add(name)
            try:
                fetched.append((yield from download(remote, name, disk, terms)))
            except DamagedError as error:
                problems.append(str(error))

    run_long_on_all_ranks(group, fetch() if group.rank == 0 else iter(()), str)
    folder, sentences = group.broadcast_object((disk.root / fetched[0] if fetched else None, problems))
    return folder, sentences


# Remote checkpoints in this machine's cache, for commands.


def fetch_to_cache(url: str) -> Path:
    """What `fetch_named` does, into a folder of this machine's cache, with the run's tokenizer and log; one process
    after the other."""
    run = RunFolder(folder_for(url))
    with _in_turn(run):
        folder = fetch_named(url, run)
        kept = run.tokenizer_json, run.tokenizer_model, run.published, run.metrics
        _write_all(small_files(_run_of(url), _ALONE, *kept))
    return folder


def _run_of(url: str) -> str:
    """The address of a run, of whose folder of checkpoints, or of one of them, `url` is, if not of the run."""
    return re.sub(rf"/{CHECKPOINTS}(/(step-)?\d+(-[0-9a-f]+)?)?/*$", "", url)


@contextmanager
def _in_turn(run: RunFolder) -> Iterator[None]:
    """Waits for other processes of this machine that fetch into the same folder: each would remove what another has
    half fetched."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / "turn").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
