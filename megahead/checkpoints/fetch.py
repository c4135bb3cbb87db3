"""Fetches checkpoints from an object store, verified, into a run's folder or this machine's cache."""

from __future__ import annotations

import fcntl
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.checkpoints.folders import (
    MANIFEST,
    Manifest,
    check_lengths,
    clear_remains,
    give_name,
    is_complete,
    partial_folder,
    point_to,
    set_aside,
    step_folder,
)
from megahead.checkpoints.format import check_files, run_long_on_all_ranks, run_on_all_ranks
from megahead.checkpoints.reading import Checkpoint, open_together
from megahead.checkpoints.remote import (
    CHECKPOINTS,
    FarRun,
    abandoned_by,
    is_one_of,
    newest_first,
    patience_with,
    step_in,
    write_all,
)
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import fsync
from megahead.remote_files import DamagedError, Expected, folder_for, joined, receive
from megahead.run_folder import RunFolder
from megahead.wording import gib

# One checkpoint from a store to a disk: beside, verified, named by one rename, as a save does.


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


# Which checkpoint of a store a session goes on from, and that all ranks have it.


_ALONE, _ANY = Group(), Terms()


@dataclass(frozen=True)
class Fetched:
    """What came of looking for a newer checkpoint in the mirror."""

    checkpoint: Checkpoint | None
    """None: no newer one can be used, for these `problems`."""

    url: str
    seconds: float = 0.0
    """That it took."""

    problems: list[str] = field(default_factory=list)
    """A sentence for each newer but damaged one."""

    def sentences(self) -> list[str]:
        """For people."""
        if self.checkpoint is None:
            return self.problems
        return [*self.problems, f"step {self.checkpoint.step:,} from {self.url} in {self.seconds:.1f} s"]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        found = {} if self.checkpoint is None else {"fetched": self.checkpoint.step, "seconds": round(self.seconds, 3)}
        return {"problems": self.problems, **found}


def fetch_newer(
    than: int, url: str, folder: RunFolder, group: Group, accept: Callable[[Checkpoint], None]
) -> Fetched | None:
    """Fetches the newest sound checkpoint of a mirror into `folder`, with the log up to there and what the run is known
    by, if one is newer than step `than`; None if none is. Collective; CheckpointError where the store cannot be read.

    `accept` may refuse one before it is fetched, on rank 0. Not counted are those of a history that the run abandoned;
    CheckpointError where there is nothing else.
    """
    began = time.monotonic()
    far = _open_together(url, group)

    def files() -> dict[Path, bytes]:
        return {} if far is None else far.contents(folder.metrics, folder.identity)

    terms = Terms.of_own(accept, files)
    final, damage = _fetch_newest(_Search(far, CHECKPOINTS, than, folder), group, terms)
    if final is not None:
        return Fetched(_newest_now(final, group), url, time.monotonic() - began, damage)
    return Fetched(None, url, problems=damage) if damage else None


def _newest_now(final: Path, group: Group) -> Checkpoint:
    run_on_all_ranks(group, lambda: point_to(final) if group.rank == 0 else None)
    return open_together(final, group)


def fetch_named(url: str, into: RunFolder, group: Group = _ALONE, terms: Terms = _ANY) -> Path:
    """Fetches the checkpoint that a URL means (one, or the newest sound one of a run, but for those that the run in
    `into` has abandoned) into `into`, and returns its folder; one that is there already is not fetched again. Which
    checkpoint there is the newest stays as it was, and newer ones that are damaged are told. Collective;
    CheckpointError where none can be had."""
    final, damage = _fetch_newest(_Search(_open_together(url, group), "", -1, into), group, terms)
    if final is None:
        raise CheckpointError(
            f"`{url}` must be a checkpoint, or the folder of a run that has one, but holds none that is sound"
            f"{': ' if damage else '.'}{' '.join(damage)}"
        )
    for each in damage if group.rank == 0 else ():
        print(f"passed over: {each}", file=sys.stderr, flush=True)
    return final


def _open_together(url: str, group: Group) -> FarRun | None:
    """On rank 0; if that fails, all raise the error."""
    opened = list[FarRun]()
    run_on_all_ranks(group, lambda: opened.append(FarRun(url, patience_with(group))) if group.rank == 0 else None)
    return opened[0] if opened else None


@dataclass
class _Search:
    """Rank 0's for the newest checkpoint below a folder of a store and above a step."""

    far: FarRun | None
    """None on other ranks."""

    below: str
    than: int
    into: RunFolder
    tried: list[str] = field(default_factory=list)

    found: tuple[str, int] | None = None
    """The next one's name in the store, and its step."""

    def next(self) -> Iterator[None]:
        """Finds the newest that was not tried, and not abandoned by the run in `into`; yields often."""
        self.found = None
        if self.far is None:
            return
        listed, abandoned = newest_first(self.far.list(self.below)), abandoned_by(self.into)
        if listed == [""] != self.tried:
            self._take("", self.far.manifest("")[1].step)
            return
        names = [name for name in listed if name and step_in(name) > self.than]
        for name in names:
            if name not in self.tried and not is_one_of(self.far, name, abandoned):
                self._take(name, step_in(name))
                return
            yield
        if names and not self.tried and self.than < 0:
            raise CheckpointError(
                f"{self.into} or {self.far.url} must hold a checkpoint to resume, but the mirror holds only what the "
                f"run went back from ({', '.join(names)}); name the one to continue from with --resume URL."
            )

    def _take(self, name: str, step: int) -> None:
        self.found = name, step
        self.tried.append(name)


def _fetch_newest(search: _Search, group: Group, terms: Terms) -> tuple[Path | None, list[str]]:
    """The folder of the one that it fetched, and a sentence for each newer one that is damaged. It lists again after
    each of these: a session that still sends may have removed it for a newer one."""
    problems = list[str]()
    root = search.into.checkpoints
    while True:
        run_long_on_all_ranks(group, search.next(), str)
        found = group.broadcast_object(search.found)
        if found is None:
            return None, problems
        problem = _fetch_together(search.far, found[0], root, group, terms)
        if problem is None:
            return step_folder(root, found[1]), problems
        problems.append(problem)


def _fetch_together(far: FarRun | None, name: str, root: Path, group: Group, terms: Terms) -> str | None:
    """Rank 0 fetches, and all meet meanwhile. Returns what is wrong with the checkpoint, if it is damaged; any other
    error is raised on all."""
    damage = []

    def fetch() -> Iterator[None]:
        if far is not None:
            try:
                yield from download(far, name, root, terms)
            except DamagedError as error:
                damage.append(str(error))

    run_long_on_all_ranks(group, fetch(), lambda error: _sentence(error, root))
    return group.broadcast_object(damage[0] if damage else None)


def _sentence(error: Exception, root: Path) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"`{root}` must take a checkpoint, but cannot ({error})."


# Far checkpoints in this machine's cache, for commands.


def fetch_to_cache(url: str) -> Path:
    """What `fetch_named` does, into a folder of this machine's cache, with the run's tokenizer and log; one process
    after the other."""
    run = RunFolder(folder_for(url))
    with _in_turn(run):
        folder = fetch_named(url, run)
        FarRun(_run_of(url)).take(run.tokenizer_json, run.tokenizer_model, run.published, run.metrics)
    return folder


def _run_of(url: str) -> str:
    """The address of a run, of whose folder of checkpoints, or of one of them, `url` is, if not of the run."""
    return re.sub(rf"/{CHECKPOINTS}(/step-\d+)?/*$", "", url)


@contextmanager
def _in_turn(run: RunFolder) -> Iterator[None]:
    """Waits for other processes of this machine that fetch into the same folder: each would remove what another has
    half fetched."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / "turn").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
