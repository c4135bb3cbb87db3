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
from megahead.mirror.downloading import download
from megahead.mirror.far_run import CHECKPOINTS, FarRun, newest_first, patience_with, step_in
from megahead.run_folder import RunFolder

_ALONE = Group()


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
    began, damage = time.monotonic(), list[str]()
    far = _open_together(url, group)

    def accept_with_log(found: Checkpoint) -> None:
        accept(found)
        if far is not None:  # before the checkpoint has its name: the next session would not fetch it again
            far.take(folder.metrics, folder.identity)

    names = run_on_all_ranks(group, lambda: _newer(far, than, folder) if far is not None else [])[0]
    for name in names:
        final = step_folder(folder.checkpoints, step_in(name))
        problem = _fetch_together(far, name, folder.checkpoints, group, accept_with_log, keeps_others=True)
        if problem is None:
            return Fetched(_newest_now(final, group), url, time.monotonic() - began, damage)
        damage.append(problem)
    return Fetched(None, url, problems=damage) if damage else None


def _newest_now(final: Path, group: Group) -> Checkpoint:
    run_on_all_ranks(group, lambda: point_to(final) if group.rank == 0 else None)
    return open_together(final, group)


def fetch_named(
    url: str,
    into: RunFolder,
    group: Group = _ALONE,
    accept: Callable[[Checkpoint], None] = lambda _: None,
    *,
    keeps_others: bool = False,
) -> Path:
    """Fetches the checkpoint that a URL means (one, or the newest sound one of a run, but for those that the run in
    `into` has abandoned) into `into`, and returns its folder; one that is there already is not fetched again. Which
    checkpoint there is the newest stays as it was, and newer ones that are damaged are told. `accept`: as in
    `fetch_newer`; `keeps_others`: as in `download`. Collective; CheckpointError where none can be had."""
    far = _open_together(url, group)
    listing = run_on_all_ranks(group, lambda: {} if far is None else _all_in(far, into))[0]
    problems = list[str]()
    for name, step in listing.items():
        problem = _fetch_together(far, name, into.checkpoints, group, accept, keeps_others)
        if problem is None:
            for each in problems if group.rank == 0 else ():
                print(f"passed over: {each}", file=sys.stderr, flush=True)
            return step_folder(into.checkpoints, step)
        problems.append(problem)
    raise CheckpointError(
        f"`{url}` must be a checkpoint, or the folder of a run that has one, but holds none that is sound"
        f"{': ' if problems else '.'}{' '.join(problems)}"
    )


def _open_together(url: str, group: Group) -> FarRun | None:
    """On rank 0; if that fails, all raise the error."""
    opened = list[FarRun]()
    run_on_all_ranks(group, lambda: opened.append(FarRun(url, patience_with(group))) if group.rank == 0 else None)
    return opened[0] if opened else None


def _newer(far: FarRun, than: int, folder: RunFolder) -> list[str]:
    """Names of checkpoints above a step, highest first, but for those that this run has abandoned."""
    above = [name for name in newest_first(far.list(CHECKPOINTS)) if step_in(name) > than]
    return _kept(far, above, folder, needed=than < 0)


def _all_in(far: FarRun, folder: RunFolder) -> dict[str, int]:
    """Checkpoints by their names in the store, highest step first, and their steps, but for those that the run in
    `folder` has abandoned."""
    names = newest_first(far.list())
    if names == [""]:
        return {"": far.manifest("")[1].step}
    return {name: step_in(name) for name in _kept(far, [name for name in names if name], folder, needed=True)}


def _kept(far: FarRun, names: list[str], folder: RunFolder, *, needed: bool) -> list[str]:
    """All but those that the run in `folder` has abandoned; where one is `needed`, they may not be all there are."""
    abandoned = abandoned_by(folder)
    kept = [name for name in names if not is_one_of(far, name, abandoned)]
    if needed and names and not kept:
        raise CheckpointError(
            f"{folder} or {far.url} must hold a checkpoint to resume, but the mirror holds only what the run went back "
            f"from ({', '.join(names)}); name the one to continue from with --resume URL."
        )
    return kept


def _fetch_together(
    far: FarRun | None,
    name: str,
    root: Path,
    group: Group,
    accept: Callable[[Checkpoint], None],
    keeps_others: bool,
) -> str | None:
    """Rank 0 fetches, and all meet meanwhile. Returns what is wrong with the checkpoint, if it is damaged; any other
    error is raised on all."""
    damage = []

    def fetch() -> Iterator[None]:
        if far is not None:
            try:
                yield from download(far, name, root, accept, keeps_others)
            except DamagedError as error:
                damage.append(str(error))

    run_long_on_all_ranks(group, fetch(), lambda error: _sentence(error, root))
    return group.broadcast_object(damage[0] if damage else None)


def _sentence(error: Exception, root: Path) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"`{root}` must take a checkpoint, but cannot ({error})."
