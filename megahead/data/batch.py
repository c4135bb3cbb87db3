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
class KeptTokens:
    """The tokens that some layers of an encoder compute alone: the others pass these layers by."""

    index_N: Tensor
    """int64, increasing: which of the B * T tokens, rows concatenated."""

    max_per_row: int
    """Largest number of them in a row."""

    layers: range
    """Which layers."""

    first_reads_all: bool = False
    """Whether they still see the others in the first of these layers."""

    cu_seqlens: Tensor | None = None
    """As `Batch.cu_seqlens`, of the shorter rows."""

    @staticmethod
    def where(kept_BT: Array, layers: range, first_reads_all: bool = False) -> KeptTokens:
        """Those that are true."""
        most = int(kept_BT.sum(1).max(initial=1))
        return KeptTokens(torch.from_numpy(np.flatnonzero(kept_BT)), most, layers, first_reads_all)


@dataclass(frozen=True)
class ReplacedTokens:
    """What it takes to replace the masked tokens and to judge all of them."""

    draw_N: Tensor
    """float64, in (0, 1): the random number of each target, which decides by what it is replaced."""

    judged_P: Tensor
    """int64, increasing: which of the B * T tokens are judged, all but special ones and padding."""


@dataclass(frozen=True)
class MaskedPhrases:
    """The ends of Q / 2 or more masked phrases of a group of rows, and K tokens among which they are looked for."""

    ends_Q: Tensor
    """int64, increasing: which of the B * T tokens are the first or last of a masked phrase that is among the K."""

    candidates_K: Tensor
    """int64, increasing: the unmasked tokens of the group's text."""

    right_QR: Tensor
    """int64: at which of the K the same phrase begins (or ends) as at each end, in other rows; -1 behind the last."""

    row_length: int
    """T."""


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

    kept: tuple[KeptTokens, ...] = ()
    """In the order of their layers; all other layers compute all tokens."""

    replaced: ReplacedTokens | None = None
    """None: the model itself learns the targets."""

    phrases: tuple[MaskedPhrases, ...] = ()
    """One for each group of rows that are searched for each other's phrases."""

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

    def judged(self) -> int:
        """How many tokens are judged, where masked ones are replaced."""
        return 0 if self.replaced is None else self.replaced.judged_P.numel()

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        kept = tuple(replace(part, **_changed(part, change)) for part in self.kept)
        replaced = None if self.replaced is None else replace(self.replaced, **_changed(self.replaced, change))
        phrases = tuple(replace(part, **_changed(part, change)) for part in self.phrases)
        return replace(self, **_changed(self, change), kept=kept, replaced=replaced, phrases=phrases)


def _changed(
    owner: Batch | KeptTokens | ReplacedTokens | MaskedPhrases, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
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
