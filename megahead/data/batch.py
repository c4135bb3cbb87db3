"""Turns rows of tokens into a model's inputs and targets. B rows, T inputs per row, N targets of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class EarlyTokens:
    """The tokens that an encoder's first layers see, where mask tokens enter later."""

    index_N: Tensor
    """int64, increasing: which of the B * T tokens, rows concatenated."""

    max_per_row: int
    """Largest number of them in a row."""

    layers: int
    """How many layers see them alone."""

    cu_seqlens: Tensor | None = None
    """As `Batch.cu_seqlens`, of the shorter rows."""


@dataclass(frozen=True)
class Batch:
    """The inputs of B rows and their targets."""

    input_ids_BT: Tensor
    """int64."""

    positions_BT: Tensor | None
    """int64, each token's position in its document (0 at the first token); None if every row is one document."""

    target_index_N: Tensor
    """int64, increasing: which of the B * T outputs, rows concatenated, have a target."""

    target_ids_N: Tensor
    """int64: what those outputs must predict."""

    max_targets_per_row: int | None = None
    """Largest number of targets in a row, if they are few (masked rows); None if almost every output has one."""

    cu_seqlens: Tensor | None = None
    """int32: the index of each document's first token, rows concatenated, then B * T (as flash-attention's varlen
    functions take it); None: not computed."""

    early: EarlyTokens | None = None
    """None: all layers see all tokens."""

    weight_N: Tensor | None = None
    """float32: how often the loss of each target counts; None: once."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> Batch:
        """The same in page-locked memory, from which a CUDA device copies in the background."""
        return self._mapped(Tensor.pin_memory)

    def weight(self) -> float:
        """How often all targets count together."""
        return self.target_ids_N.numel() if self.weight_N is None else float(self.weight_N.sum(dtype=torch.float64))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        early = None if self.early is None else replace(self.early, **_changed(self.early, change))
        return replace(self, **_changed(self, change), early=early)


def _changed(owner: Batch | EarlyTokens, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Its tensors by name, changed."""
    values = {field.name: getattr(owner, field.name) for field in fields(owner)}
    return {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}


def causal_batch(
    rows: Array,
    document_starts: Array | None = None,
    *,
    end_token: int,
    isolate_documents: bool,
    boundary_targets: bool,
) -> Batch:
    """Next-token prediction over `rows`, int64 [B, T+1]: the target of token t is token t + 1.

    A document begins after each end token (which belongs to the document that it closes), and where `document_starts`
    (bool [B, T+1]) is true. With `isolate_documents` positions restart there. Without `boundary_targets` the last token
    of a document has no target (the next token belongs to another document). Negative tokens are padding: they are read
    as end tokens, each as a document of its own, have no targets and are no targets.
    """
    inputs_BT = np.ascontiguousarray(rows[:, :-1])
    targets = rows[:, 1:].reshape(-1)
    padding_BT = inputs_BT < 0
    if padded := bool(padding_BT.any()) or bool((targets < 0).any()):
        inputs_BT = np.where(padding_BT, end_token, inputs_BT)
    last_token_BT = (inputs_BT == end_token) | (rows[:, 1:] < 0)
    if document_starts is not None:
        last_token_BT |= document_starts[:, 1:]
    if boundary_targets and not padded:
        target_index_N = np.arange(inputs_BT.size)
    else:
        no_target_BT = last_token_BT if not boundary_targets else padding_BT
        target_index_N = np.flatnonzero(~no_target_BT.reshape(-1) & (targets >= 0))
    positions_BT = document_positions(last_token_BT) if isolate_documents and last_token_BT[:, :-1].any() else None
    return Batch(
        torch.from_numpy(inputs_BT),
        None if positions_BT is None else torch.from_numpy(positions_BT),
        torch.from_numpy(target_index_N),
        torch.from_numpy(targets[target_index_N]),
    )


def document_positions(last_token_BT: Array) -> Array:
    """int64 [B, T]: distance of each token to the first token of its document (or of its row).

    last_token_BT: bool, whether a token is the last of its document.
    """
    place_T = np.arange(last_token_BT.shape[1])
    first_BT = np.zeros(last_token_BT.shape, np.int64)
    first_BT[:, 1:] = np.where(last_token_BT[:, :-1], place_T[1:], 0)
    return place_T - np.maximum.accumulate(first_BT, axis=1)
