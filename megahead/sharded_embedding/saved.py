"""A sharded embedding in a checkpoint, in the form that its reader needs: rows up to date, or with pending updates.

A run with `engine.embedding: rows` saves `late/KIND/NAME`: weights and moments as of each row's last update, `touched`
(the step of that update) and `rates` (the learning rate of every step). Reading `KIND/NAME` then gives what AdamW over
all rows would have made of them. Reading `late/KIND/NAME` of a checkpoint with an ordinary embedding gives rows that
its last step updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megahead.config.training import OptimizerConfig
from megahead.distributed.tensors import block_ranges
from megahead.errors import CheckpointError
from megahead.sharded_embedding.optimizer import build_row_optimizer

_LAZY = "late/"
"""What the names of a sharded embedding's tensors begin with in a checkpoint."""
LAST_STEP, RATES = "touched", "rates"


class Stored(Protocol):
    """What a checkpoint offers."""

    folder: Any

    @property
    def tensors(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def state_value(self, name: str, type_: Any, default: Any = None) -> Any: ...
    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, rows: range) -> Tensor: ...
    def blocks(self, name: str) -> Iterator[Tensor]: ...


def names_up_to_date(stored: Iterable[str]) -> list[str]:
    """The names that can be read because rows with pending updates were saved for them."""
    names = [name.removeprefix(_LAZY) for name in stored if name.startswith(_LAZY)]
    return [name for name in names if name.split("/")[0] not in (LAST_STEP, RATES)]


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that was not saved, but can be made of others that were."""

    shape: tuple[int, ...]
    blocks: Iterator[Tensor]


def derive(checkpoint: Stored, name: str) -> DerivedTensor:
    """`name`, which was not saved, made of tensors that were; CheckpointError where that cannot be. Blocks are read
    when they are iterated."""
    if f"{_LAZY}{name}" in checkpoint.tensors:
        return DerivedTensor(checkpoint.tensors[f"{_LAZY}{name}"].shape, _up_to_date(checkpoint, name))
    kind, _, parameter = name.removeprefix(_LAZY).partition("/")
    known = name.startswith(_LAZY) and f"weight/{parameter}" in checkpoint.tensors
    if known and kind == LAST_STEP:
        rows = checkpoint.tensors[f"weight/{parameter}"].shape[:1]
        last_step = torch.full(rows, checkpoint.state_value("optimizer_steps", int), dtype=torch.int32)
        return DerivedTensor(rows, iter([last_step]))
    if known and kind == RATES:
        rates = torch.zeros(checkpoint.state_value("optimizer_steps", int), dtype=torch.float64)
        return DerivedTensor(rates.shape, iter([rates]))
    if known and f"{kind}/{parameter}" in checkpoint.tensors:
        plain = f"{kind}/{parameter}"
        return DerivedTensor(checkpoint.tensors[plain].shape, checkpoint.blocks(plain))
    raise CheckpointError(
        f"`{checkpoint.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
    )


def _up_to_date(checkpoint: Stored, name: str) -> Iterator[Tensor]:
    """`name`, saved as rows with pending updates, with these updates."""
    kind, _, parameter = name.partition("/")
    config = OptimizerConfig.model_validate(checkpoint.config.get("optimizer"))
    row_optimizer = build_row_optimizer(config.table.rule, config)
    row_optimizer.resume(checkpoint.read(f"{_LAZY}{RATES}/{parameter}").numpy())
    kinds, count = ("weight", *row_optimizer.moments), checkpoint.tensors[f"{_LAZY}{name}"].shape[0]
    for block in block_ranges(count):
        rows = {each: checkpoint.read_rows(f"{_LAZY}{each}/{parameter}", block) for each in kinds}
        row_optimizer.catch_up_(rows, checkpoint.read_rows(f"{_LAZY}{LAST_STEP}/{parameter}", block))
        yield rows[kind]
