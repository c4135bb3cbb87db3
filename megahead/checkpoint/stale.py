"""An embedding in a checkpoint, in the form that its reader needs: all rows up to date, or stale rows.

Stale rows are those that the last steps did not update, because no batch used them. A run with `engine.embedding: rows`
saves `late/KIND/NAME`: weights and moments as of each row's last update, `touched` (the step of that update) and
`rates` (the learning rate of every step). Reading `KIND/NAME` then gives what AdamW over all rows would have made of
them. Reading `late/KIND/NAME` of a checkpoint with an ordinary embedding gives rows that its last step updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megahead.config import OptimizerConfig
from megahead.distributed import block_ranges
from megahead.errors import CheckpointError
from megahead.optim import RowRule, build_row_rule

_STALE = "late/"
"""What their names begin with in a checkpoint."""
_TOUCHED, _RATES = "touched", "rates"


class Stored(Protocol):
    """What a checkpoint offers."""

    folder: Any

    @property
    def tensors(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def state_value(self, name: str, type_: Any, absent: Any = None) -> Any: ...
    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, rows: range) -> Tensor: ...
    def blocks(self, name: str) -> Iterator[Tensor]: ...


def stale_names(stored: Iterable[str]) -> list[str]:
    """The names that can be read because stale rows were saved for them."""
    names = [name.removeprefix(_STALE) for name in stored if name.startswith(_STALE)]
    return [name for name in names if name.split("/")[0] not in (_TOUCHED, _RATES)]


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that was not saved, but can be made of others that were."""

    shape: tuple[int, ...]
    blocks: Iterator[Tensor]


def derive(checkpoint: Stored, name: str) -> DerivedTensor:
    """`name`, which was not saved, made of tensors that were; CheckpointError where that cannot be. Blocks are read
    when they are iterated."""
    if f"{_STALE}{name}" in checkpoint.tensors:
        return DerivedTensor(checkpoint.tensors[f"{_STALE}{name}"].shape, _up_to_date(checkpoint, name))
    kind, _, parameter = name.removeprefix(_STALE).partition("/")
    known = name.startswith(_STALE) and f"weight/{parameter}" in checkpoint.tensors
    if known and kind == _TOUCHED:
        rows = checkpoint.tensors[f"weight/{parameter}"].shape[:1]
        touched = torch.full(rows, checkpoint.state_value("optimizer_steps", int), dtype=torch.int32)
        return DerivedTensor(rows, iter([touched]))
    if known and kind == _RATES:
        rates = torch.zeros(checkpoint.state_value("optimizer_steps", int), dtype=torch.float64)
        return DerivedTensor(rates.shape, iter([rates]))
    if known and f"{kind}/{parameter}" in checkpoint.tensors:
        plain = f"{kind}/{parameter}"
        return DerivedTensor(checkpoint.tensors[plain].shape, checkpoint.blocks(plain))
    raise CheckpointError(
        f"`{checkpoint.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
    )


def _up_to_date(checkpoint: Stored, name: str) -> Iterator[Tensor]:
    """`name`, saved as stale rows, with all updates that they wait for."""
    kind, _, parameter = name.partition("/")
    rule = _rule_of(checkpoint)
    rule.resume(checkpoint.read(f"{_STALE}{_RATES}/{parameter}").numpy())
    kinds, count = ("weight", *rule.moments), checkpoint.tensors[f"{_STALE}{name}"].shape[0]
    for block in block_ranges(count):
        rows = {each: checkpoint.read_rows(f"{_STALE}{each}/{parameter}", block) for each in kinds}
        rule.catch_up_(rows, checkpoint.read_rows(f"{_STALE}{_TOUCHED}/{parameter}", block))
        yield rows[kind]


def _rule_of(checkpoint: Stored) -> RowRule:
    """The optimizer of its rows (`optimizer.table.rule`)."""
    config = OptimizerConfig.model_validate(checkpoint.config.get("optimizer"))
    return build_row_rule(config.table.rule, config)
