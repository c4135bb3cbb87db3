"""Conversion of an embedding in a checkpoint between up-to-date rows and rows with pending updates.

A run with `engine.embedding: rows` saves `late/KIND/NAME`: weights and moments as of each row's last update, `touched`
(the step of that update) and `rates` (the learning rate of every step). Reading `KIND/NAME` applies the pending
updates, which gives the result of AdamW over all rows. Reading `late/KIND/NAME` from a checkpoint with a dense
embedding gives rows updated by its last step.
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

_PENDING_PREFIX = "late/"
"""Prefix of a sharded embedding's tensors in a checkpoint."""
LAST_STEP, RATES = "touched", "rates"


class CheckpointReader(Protocol):
    """The interface of a checkpoint."""

    folder: Any

    @property
    def tensors(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def state_value(self, name: str, type_: Any, default: Any = None) -> Any: ...
    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, rows: range) -> Tensor: ...
    def blocks(self, name: str) -> Iterator[Tensor]: ...


def derivable_names(tensor_names: Iterable[str]) -> list[str]:
    """The names of up-to-date tensors that can be derived from tensors with pending updates."""
    names = [name.removeprefix(_PENDING_PREFIX) for name in tensor_names if name.startswith(_PENDING_PREFIX)]
    return [name for name in names if name.split("/")[0] not in (LAST_STEP, RATES)]


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor computed from saved ones."""

    shape: tuple[int, ...]
    blocks: Iterator[Tensor]


def derive(checkpoint: CheckpointReader, name: str) -> DerivedTensor:
    """The tensor `name`, which was not saved, computed from saved tensors; CheckpointError if these are missing. Reads
    blocks on iteration."""
    if f"{_PENDING_PREFIX}{name}" in checkpoint.tensors:
        return DerivedTensor(checkpoint.tensors[f"{_PENDING_PREFIX}{name}"].shape, _updated_blocks(checkpoint, name))
    kind, _, parameter = name.removeprefix(_PENDING_PREFIX).partition("/")
    is_dense = name.startswith(_PENDING_PREFIX) and f"weight/{parameter}" in checkpoint.tensors
    if is_dense and kind == LAST_STEP:
        rows = checkpoint.tensors[f"weight/{parameter}"].shape[:1]
        last_step = torch.full(rows, checkpoint.state_value("optimizer_steps", int), dtype=torch.int32)
        return DerivedTensor(rows, iter([last_step]))
    if is_dense and kind == RATES:
        rates = torch.zeros(checkpoint.state_value("optimizer_steps", int), dtype=torch.float64)
        return DerivedTensor(rates.shape, iter([rates]))
    if is_dense and f"{kind}/{parameter}" in checkpoint.tensors:
        dense_name = f"{kind}/{parameter}"
        return DerivedTensor(checkpoint.tensors[dense_name].shape, checkpoint.blocks(dense_name))
    raise CheckpointError(
        f"`{checkpoint.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
    )


def _updated_blocks(checkpoint: CheckpointReader, name: str) -> Iterator[Tensor]:
    """Blocks of the tensor `name`, saved with pending updates, after these updates."""
    kind, _, parameter = name.partition("/")
    config = OptimizerConfig.model_validate(checkpoint.config.get("optimizer"))
    row_optimizer = build_row_optimizer(config.table.rule, config)
    row_optimizer.resume(checkpoint.read(f"{_PENDING_PREFIX}{RATES}/{parameter}").numpy())
    kinds, count = ("weight", *row_optimizer.moments), checkpoint.tensors[f"{_PENDING_PREFIX}{name}"].shape[0]
    for block in block_ranges(count):
        rows = {name: checkpoint.read_rows(f"{_PENDING_PREFIX}{name}/{parameter}", block) for name in kinds}
        row_optimizer.apply_pending_updates_(
            rows, checkpoint.read_rows(f"{_PENDING_PREFIX}{LAST_STEP}/{parameter}", block)
        )
        yield rows[kind]
