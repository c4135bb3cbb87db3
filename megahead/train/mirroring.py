"""A run and its mirror in a store: what a session fetches from there, and how it waits for what it sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from megahead.checkpoint import Checkpoint, KeepRules, run_long_on_all_ranks, run_on_all_ranks
from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.far import is_below, is_far
from megahead.mirror import (
    Claim,
    FarRun,
    Fetched,
    Mirror,
    News,
    Terms,
    announce,
    fetch_named,
    fetch_newer,
    patience_with,
    refuse_another_mirror,
)
from megahead.run_folder import RunFolder
from megahead.train.datasets import RunDatasets
from megahead.train.hold import Hold
from megahead.train.identity import data_fingerprints, refuse_another_run
from megahead.train.preemption import Ending, StopRequest

SECONDS_AFTER_SIGNAL = 20.0
"""How long after its signal a session that torchrun's agent has asked to stop may still wait for its mirror: ranks are
killed after 30 s. What is missing then, the next session sends."""


def look_at_mirror(resume: str, config: RunConfig, mark: str, world_group: Group) -> bytes | None:
    """By what the run is known in its mirror, if it has begun there; announces the session with this mark. Collective;
    CheckpointError if the mirror is another run's, or cannot be used."""
    url = config.training.mirror

    def look() -> bytes | None:
        if url is None or world_group.rank != 0:
            return None
        far = FarRun(url, patience_with(world_group))
        known_as = refuse_another_mirror(far, config.folder(), resume)
        announce(far.store, mark)
        return known_as

    return run_on_all_ranks(world_group, look)[0]


def near_resume(resume: str, config: RunConfig, datasets: RunDatasets, world_group: Group) -> str:
    """What `--resume` asks for; a checkpoint at a URL is fetched, and its folder on this disk named instead.

    One of the run's own mirror becomes one of the run's checkpoints. Collective; CheckpointError if it is of a run that
    may not be resumed, or the store cannot be read.
    """
    if not is_far(resume):
        return resume
    url, folder, accept = config.training.mirror, config.folder(), _accepting(resume, config, datasets)
    if url is None or not is_below(resume, url):
        return str(fetch_named(resume, RunFolder(folder.fetched), world_group, Terms(accept)))

    def files() -> dict[Path, bytes]:
        log = [] if folder.metrics.exists() else [folder.metrics]
        return FarRun(url, patience_with(world_group)).contents(*log, folder.identity)

    return str(fetch_named(resume, folder, world_group, Terms.of_own(accept, files)))


def fetch_from_mirror(than: int, config: RunConfig, datasets: RunDatasets, world_group: Group) -> Fetched | None:
    """The mirror's newest checkpoint, if that is newer than step `than`: it is in the run's folder then. Collective;
    CheckpointError if it is of a run that may not be resumed."""
    url = config.training.mirror
    if url is None:
        return None
    return fetch_newer(than, url, config.folder(), world_group, _accepting(url, config, datasets))


def _accepting(url: str, config: RunConfig, datasets: RunDatasets) -> Callable[[Checkpoint], None]:
    """Refuses a checkpoint at `url` that the run may not go on from."""
    fingerprints = data_fingerprints(config, datasets)

    def accept(found: Checkpoint) -> None:
        try:
            refuse_another_run(found, config, fingerprints)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(found.folder), f"{url} (step {found.step:,})")) from None

    return accept


def open_mirror(
    config: RunConfig, known_as: bytes | None, hold: Hold | None, tip: int, keep_rules: KeepRules
) -> Mirror | None:
    """The mirror of a session that has the `hold` on its run's folder, and begins with the checkpoint of step `tip`
    there: rank 0's. `known_as`: the run, in the mirror."""
    training, folder = config.training, config.folder()
    if training.mirror is None or hold is None:
        return None
    far = FarRun(training.mirror)
    claim = Claim(far.store, folder, hold.mark, known_as)
    return Mirror(far, folder, claim, tip, training.keep_checkpoints, keep_rules)


def last_moment(ending: Ending, stop: StopRequest, restarts: bool) -> float:
    """Until when on the monotonic clock a session that ends may wait for its mirror. `restarts`: whether the launcher
    starts ranks again, and will not wait for long if it has asked them to stop."""
    if ending != "stopped" or not restarts:
        return inf
    return (stop.came or time.monotonic()) + SECONDS_AFTER_SIGNAL


def finish_mirror(mirror: Mirror | None, deadline: float, world_group: Group) -> list[News]:
    """Waits until all is sent, or until then, and returns what happened meanwhile. Collective."""
    run_long_on_all_ranks(world_group, iter(()) if mirror is None else mirror.finishing(deadline), str)
    return [] if mirror is None else mirror.news()
