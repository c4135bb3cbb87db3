"""Keeps a copy of the run in the memory of its nodes, renewed every `training.copy_every` steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from megahead.copies import Copy, MemoryCopies
from megahead.errors import CheckpointError
from megahead.train.progress import Progress


@dataclass(frozen=True)
class Renewal:
    """What became of a copy when it was due."""

    facts: dict[str, Any]
    """For the log: `stall_seconds` that training waited and `bytes` of the state; or how many were `skipped` so far, or
    why copies are `off`."""

    sentence: str | None = None
    """For the console, if there is news."""


class Copier:
    """Renews the copy of a phase's run, if it has `copies`. Methods but `due` are collective.

    Training waits while weights are copied, but neither for files nor for other nodes: while the last copy is on its
    way, those that are due are left out. What goes wrong ends copies, and nothing else.
    """

    def __init__(self, progress: Progress, copies: MemoryCopies | None) -> None:
        self._progress, self._copies = progress, copies
        self._every = progress.phase.config.training.copy_every or 0
        self._skipped = 0

    def due(self, step: int) -> bool:
        """Whether to renew it behind that step."""
        return self._copies is not None and step % self._every == 0

    def renew(self) -> Renewal:
        """Begins a copy of the present state, if the last one is complete; only where one is `due`."""
        began, copies = time.monotonic(), self._copies
        assert copies is not None
        try:
            if not copies.may_begin():
                return self._skip()
        except CheckpointError as error:
            self._copies = None
            copies.close()
            return Renewal(
                {"off": str(error)}, f"step {self._progress.state.step:,}: no more copies in memory: {error}"
            )
        moment = self._progress.moment(self._progress.world_group, copied=True)
        check, parent_step = moment.must_be_finite, moment.parent_step
        copies.begin(Copy(moment.step, moment.snapshot, check, moment.counters, moment.config, parent_step))
        return Renewal({"stall_seconds": round(time.monotonic() - began, 3), "bytes": moment.snapshot.total_bytes})

    def forget(self) -> None:
        """Before the run goes back to an older state."""
        if self._copies is not None:
            self._copies.forget()

    def _skip(self) -> Renewal:
        self._skipped += 1
        if self._skipped > 1:
            return Renewal({"skipped": self._skipped})
        step = self._progress.state.step
        sentence = f"step {step:,}: the copy in memory is not renewed, since the last one is still on its way"
        return Renewal({"skipped": 1}, sentence)
