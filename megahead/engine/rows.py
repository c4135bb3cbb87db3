"""The engine for a model whose embedding is kept outside it, as a table of rows that are sharded round-robin over all
ranks. A step is applied to both or to neither. Stale rows are those that the last steps did not update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from megahead.distributed import Mesh, Renamed, RowShard, Tensors, Whole
from megahead.engine.engine import Engine, StepResult
from megahead.table import BALLAST, RowPlan, RowTable


class RowEngine(Engine):
    """An `Engine` whose `begin` fetches the rows that a step needs, and whose `step` updates them.

    `module` contains a `RowTable`. In `weights` and `tensors` its rows are named `NAME.weight`, as an embedding's
    would be.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: Mesh,
        device: torch.device,
        weights: Tensors,
    ) -> None:
        self._name, table = next(pair for pair in module.named_modules() if isinstance(pair[1], RowTable))
        self._table = cast(RowTable, table)

        def body(name: str) -> Tensor:
            return torch.zeros(BALLAST) if name == f"{self._name}.ballast" else weights.read(name)

        super().__init__(module, optimizer=optimizer, config=config, mesh=mesh, device=device, weights=Whole(body))
        self._table.fill_(weights.blocks(f"{self._name}.weight"))

    def begin(self, rows: RowPlan | None) -> int:
        """Fetches the rows that the next micro-steps look up; returns how many that this rank owns were stale.

        Collective."""
        assert rows is not None
        stale = self._table.owned.count_stale(rows.owned_O)
        self._table.fetch(rows)
        return stale

    def step(self, learning_rate: float) -> StepResult:
        loss_scale = self.loss_scale.value
        result = super().step(learning_rate)
        if result.applied:
            clipped = min(1.0, self._clipping / (result.grad_norm + 1e-6)) if self._clipping else 1.0
            self._table.step(learning_rate, clipped / loss_scale)
        else:
            self._table.discard()
        return result

    def skip_step(self) -> StepResult:
        self._table.discard()
        return super().skip_step()

    def tensors(self) -> Iterator[tuple[str, Tensor | RowShard]]:
        """The body's tensors as in any engine. Then the table's, as `late/KIND/NAME`: `weight` and the moments as last
        updated, `touched` (the step of each row's last update), `rates` (the learning rate of every step)."""
        yield from super().tensors()
        for kind, part in self._table.state().items():
            yield f"late/{kind}/{self._name}.weight", part

    def load(self, tensors: Tensors, optimizer_steps: int) -> None:
        """As of any engine; rows come block by block, and each rank keeps its own."""
        super().load(tensors, optimizer_steps)
        self._table.restore(Renamed(tensors, lambda kind: f"late/{kind}/{self._name}.weight"))

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """Leaves out the ballast (see `table`): it is neither saved nor loaded."""
        there = super()._saved_parameters()
        return {name: parameter for name, parameter in there.items() if parameter is not self._table.ballast}
