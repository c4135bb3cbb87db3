"""Which checkpoint of a store a session goes on from, and that all ranks have it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.checkpoint import Checkpoint, open_together, run_long_on_all_ranks, run_on_all_ranks, step_folder
from megahead.checkpoint.folders import point_to
from megahead.distributed import Group
from megahead.errors import CheckpointError, UserError
from megahead.far import DamagedError
from megahead.mirror.abandoned import abandoned_by, is_one_of
from megahead.mirror.downloading import Terms, download
from megahead.mirror.far_run import CHECKPOINTS, FarRun, newest_first, patience_with, step_in
from megahead.run_folder import RunFolder

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
