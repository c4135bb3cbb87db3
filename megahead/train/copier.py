"""Keeps a copy of the run in the memory of its nodes, renewed every `training.copy_every` steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from megahead.config import RunConfig
from megahead.copies import Copy, MemoryCopies
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.errors import CheckpointError
from megahead.train.lineage import Lineage
from megahead.train.moment import Moment
from megahead.train.state import TrainingState


@dataclass(frozen=True)
class Renewal:
    """What became of a copy when it was due."""

    facts: dict[str, Any]
    """For the log: `stall_seconds` that training waited and `bytes` of the state; or how many were `skipped` so far, or
    why copies are `off`."""

    sentence: str | None = None
    """For the console, if there is news."""


class Copier:
    """Renews the copy of a phase's run, if it has `copies`. Methods but `due` are collective over `world_group`.

    Training waits while weights are copied, but neither for files nor for other nodes: while the last copy is on its
    way, those that are due are left out. What goes wrong ends copies, and nothing else.
    """

    def __init__(
        self,
        engine: Engine,
        state: TrainingState,
        config: RunConfig,
        data_group: Group,
        world_group: Group,
        lineage: Lineage,
        copies: MemoryCopies | None,
    ) -> None:
        self._engine, self._state, self._data_group, self._world_group = engine, state, data_group, world_group
        self._config, self._every = config.model_dump(mode="json"), config.training.copy_every or 0
        self._lineage, self._copies = lineage, copies
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
            return Renewal({"off": str(error)}, f"step {self._state.step:,}: no more copies in memory: {error}")
        moment = Moment.take(self._engine, self._state, self._data_group, self._world_group, copied=True)
        copies.begin(
            Copy(moment.step, moment.snapshot, moment.must_be_finite, moment.counters, self._config, self._lineage.tip)
        )
        return Renewal({"stall_seconds": round(time.monotonic() - began, 3), "bytes": moment.snapshot.total_bytes})

    def forget(self) -> None:
        """Before the run goes back to an older state."""
        if self._copies is not None:
            self._copies.forget()

    def _skip(self) -> Renewal:
        self._skipped += 1
        if self._skipped > 1:
            return Renewal({"skipped": self._skipped})
        sentence = (
            f"step {self._state.step:,}: the copy in memory is not renewed, since the last one is still on its way"
        )
        return Renewal({"skipped": 1}, sentence)
