"""Saves a run's checkpoints, at once or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from megahead.checkpoint import KeepRules, run_on_all_ranks, write_snapshot
from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.mirror import Mirror
from megahead.train.hold import Hold
from megahead.train.lineage import Lineage
from megahead.train.moment import Moment
from megahead.train.state import TrainingState


class Saver:
    """Writes checkpoints of the complete run into its folder. Every method is collective over `world_group`.

    In the background, training waits only while weights are copied; a second save waits for the first. If a background
    save fails, `wait` raises its error; once `failed` is true on any rank, all ranks must call `wait`. A state with
    numbers that are not finite is not saved.
    """

    def __init__(
        self,
        engine: Engine,
        state: TrainingState,
        config: RunConfig,
        data_group: Group,
        world_group: Group,
        lineage: Lineage,
        hold: Hold | None = None,
        kept_steps: Collection[int] = (),
        mirror: Mirror | None = None,
    ) -> None:
        """`kept_steps`: checkpoints of these are kept for good, beside those that the config names; `mirror`: rank 0's,
        to which each checkpoint is given."""
        training = config.training
        self._engine, self._state, self._data_group = engine, state, data_group
        self._config = config.model_dump(mode="json")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save") if training.save_in_background else None
        # a gloo connection of its own, since another thread may use it at the same time
        self._world_group = world_group.side_channel() if self._pool else world_group
        in_hand = () if mirror is None else mirror.in_hand
        keep_rules = KeepRules(training.keep_every, kept_steps, training.keep_best, read_now=in_hand)
        self._lineage, self._mirror = lineage, mirror
        self._write = partial(
            write_snapshot, lineage.root, group=self._world_group, keep=training.keep_checkpoints, keep_rules=keep_rules
        )
        self._hold = hold
        self._pending: Future[Path] | None = None
        self._saved_at = (state.step, state.samples) if lineage.tip == state.step else None
        self._folder: Path | None = None

    @property
    def up_to_date(self) -> bool:
        """Whether the current state is saved."""
        return self._saved_at == (self._state.step, self._state.samples)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has gone wrong (as far as this rank knows)."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self) -> float:
        """Saves, and returns the seconds that training waited for it."""
        started = time.monotonic()
        self.wait()
        state, copied = self._state, self._pool is not None
        moment = Moment.take(self._engine, state, self._data_group, self._world_group, copied=copied)
        parent_step = self._lineage.extend_to(state.step)
        write = partial(
            self._write,
            moment.step,
            moment.snapshot,
            state=moment.counters,
            config=self._config,
            parent_step=parent_step,
        )
        if self._pool:
            self._pending = self._pool.submit(self._checked, moment.must_be_finite, write, parent_step)
        else:
            self._folder = self._checked(moment.must_be_finite, write, parent_step)
        self._saved_at = state.step, state.samples
        return time.monotonic() - started

    def wait(self) -> Path | None:
        """Waits until a background save is on disk, and raises its error. Returns the last folder saved, if any."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._folder = pending.result()
        return self._folder

    def _checked(self, check: Callable[[], None], write: Callable[[], Path], parent_step: int) -> Path:
        """Writes, unless `check` raises on any rank, or another session has taken the folder or the mirror."""
        checks = [check, *(each.check for each in (self._hold, self._mirror) if each is not None)]
        run_on_all_ranks(self._world_group, lambda: [check() for check in checks])
        folder = write()
        if self._mirror is not None:
            self._mirror.offer(folder, parent_step)
        return folder
