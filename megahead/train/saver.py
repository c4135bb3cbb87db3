"""Saves a run's checkpoints, at once or in the background."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megahead.checkpoint import KeepRules, run_on_all_ranks, step_folder, write_snapshot
from megahead.mirror import Mirror, News
from megahead.train.hold import Hold
from megahead.train.moment import Moment
from megahead.train.progress import Progress


class Saver:
    """Writes checkpoints of the complete run into its folder. Every method but `news` is collective.

    In the background, training waits only while weights are copied; a second save waits for the first. If a background
    save fails, `wait` raises its error; once `failed` is true on any rank, all ranks must call `wait`. A state with
    numbers that are not finite is not saved.
    """

    def __init__(self, progress: Progress, keep_rules: KeepRules, hold: Hold | None, mirror: Mirror | None) -> None:
        """`keep_rules`: of the run; `hold`, `mirror`: rank 0's, if the run has one. Each checkpoint is given to it."""
        training = progress.phase.config.training
        self._progress, self._hold, self._mirror = progress, hold, mirror
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save") if training.save_in_background else None
        # a gloo connection of its own, since another thread may use it at the same time
        self._group = progress.world_group.side_channel() if self._pool else progress.world_group
        self._keep = training.keep_checkpoints
        self._keep_rules = keep_rules if mirror is None else replace(keep_rules, read_now=mirror.in_hand)
        self._pending: Future[Path] | None = None
        self._saved_at = self._reached() if progress.lineage.tip == progress.state.step else None
        self._folder = step_folder(progress.lineage.root, progress.state.step) if self.up_to_date else None

    def _reached(self) -> tuple[int, int]:
        return self._progress.state.step, self._progress.state.samples

    @property
    def up_to_date(self) -> bool:
        """Whether the current state is saved."""
        return self._saved_at == self._reached()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has gone wrong (as far as this rank knows)."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self) -> float:
        """Saves, and returns the seconds that training waited for it."""
        started = time.monotonic()
        self.wait()
        moment = self._progress.moment(self._group, copied=self._pool is not None)
        self._progress.lineage.tip = moment.step
        if self._pool:
            self._pending = self._pool.submit(self._write, moment)
        else:
            self._folder = self._write(moment)
        self._saved_at = self._reached()
        return time.monotonic() - started

    def wait(self) -> Path | None:
        """Waits until a background save is on disk, and raises its error. Returns the last folder saved,
        at first that of the resumed checkpoint; None if there is none in the run's folder yet."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._folder = pending.result()
        return self._folder

    def news(self) -> list[News]:
        """What became of checkpoints on their way to the mirror, since the last call."""
        return [] if self._mirror is None else self._mirror.news()

    def _write(self, moment: Moment) -> Path:
        """Unless a number is not finite on any rank, or another session has taken the folder or the mirror."""
        checks = [moment.must_be_finite, *(each.check for each in (self._hold, self._mirror) if each is not None)]
        run_on_all_ranks(self._group, lambda: [check() for check in checks])
        folder = write_snapshot(
            self._progress.lineage.root,
            moment.step,
            moment.snapshot,
            state=moment.counters,
            config=moment.config,
            parent_step=moment.parent_step,
            group=self._group,
            keep=self._keep,
            keep_rules=self._keep_rules,
        )
        if self._mirror is not None:
            self._mirror.offer(folder, moment.parent_step)
        return folder
