"""Structure of a batch beside its ids: packed documents, target positions, and token subsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# Each value of `Documents` is computed when it is first needed, and shared by all blocks. B rows, T tokens a row, S
# documents in all rows together (a document ends with its row at the latest).


T = TypeVar("T")


class _LazyProperty(Generic[T]):
    """A `functools.cached_property` that `torch.compile` can trace. A traced block does not cache it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, documents: object, owner: type) -> T:
        value = self.compute(documents)
        if not torch.compiler.is_compiling():
            documents.__dict__[self.compute.__name__] = value
        return value


class Documents:
    """The document boundaries of a batch. A token attends only to its document, or to a window of it."""

    positions_BT: Tensor
    """int64: position of each token in its document, from 0; [1, T] if each row is one document."""

    one_per_row: bool
    """Whether each row is one document."""

    window: int | None
    """Attention window in tokens to each side, as flash-attn's `window_size`; None: the whole document."""

    def __init__(
        self,
        positions_BT: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        one_per_row: bool = False,
        window: int | None = None,
        starts_BT: Tensor | None = None,
    ) -> None:
        """`positions_BT` restart at 0 with each document, unless `starts_BT` marks the document starts.
        Given `cu_seqlens` save a synchronization with the GPU."""
        self.positions_BT, self.one_per_row, self.window = positions_BT, one_per_row, window
        if starts_BT is not None:
            self.starts_BT = starts_BT
        if cu_seqlens is not None:
            self.cu_seqlens = cu_seqlens

    @staticmethod
    def whole_rows(rows: int, row_length: int, device: torch.device | None = None) -> Documents:
        """Each row is one document. Needs neither a mask nor a synchronization."""
        positions_1T = torch.arange(row_length, device=device)[None]
        cu_seqlens = torch.arange(0, rows * row_length + 1, row_length, dtype=torch.int32, device=device)
        return Documents(positions_1T, cu_seqlens, one_per_row=True)

    def within(self, window: int) -> Documents:
        """The same documents with sliding-window attention of `window` tokens to each side."""
        if self.positions_BT.shape[1] <= window + 1:  # no row is longer
            return self
        starts_BT = None if self.one_per_row else self.starts_BT
        return Documents(
            self.positions_BT, self.cu_seqlens, one_per_row=self.one_per_row, window=window, starts_BT=starts_BT
        )

    @property
    def need_no_mask(self) -> bool:
        """Whether all tokens of a row attend to each other, so that no mask is needed."""
        return self.one_per_row and self.window is None

    @_LazyProperty
    def starts_BT(self) -> Tensor:
        """True at the first token of each document, and of each row."""
        starts_BT = self.positions_BT == 0
        starts_BT[:, 0] = True
        return starts_BT

    @_LazyProperty
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: start of each document in the flattened B*T tokens, then B*T (repeated for empty documents:
        `padded_cu_seqlens`).

        Synchronizes with the GPU unless it was given.
        """
        starts_S = self.starts_BT.flatten().nonzero().flatten()
        return F.pad(starts_S, (0, 1), value=self.starts_BT.numel()).to(torch.int32)

    def padded_cu_seqlens(self, multiple: int) -> Tensor:
        """`cu_seqlens` with empty documents at the end, so that its length is a multiple: few shapes to compile for."""
        return F.pad(self.cu_seqlens, (0, -len(self.cu_seqlens) % multiple), value=self.starts_BT.numel())

    @_LazyProperty
    def lengths(self) -> list[int]:
        """Tokens of each document, in order; they sum to B*T. Synchronizes with the GPU."""
        return [length for length in self.cu_seqlens.diff().tolist() if length]

    @_LazyProperty
    def mask_BTT(self) -> Tensor:
        """True where two tokens of an encoder attend to each other: in one document, and within the window. [1, T, T]
        if each row is one document."""
        document_BT = self.starts_BT.cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        if self.window is None:
            return same_BTT
        place_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        return same_BTT & ((place_T[:, None] - place_T).abs() <= self.window)

    @_LazyProperty
    def causal_mask_BTT(self) -> Tensor:
        """True where a decoder's token (dim 1) attends to a token (dim 2): itself and earlier ones in its document."""
        return self.mask_BTT.tril()

    @_LazyProperty
    def half_bias_BTT(self) -> Tensor:
        """`mask_BTT` as an additive bf16 bias."""
        return bias_of(self.mask_BTT, torch.bfloat16)

    @_LazyProperty
    def causal_half_bias_BTT(self) -> Tensor:
        """`causal_mask_BTT` as an additive bf16 bias."""
        return bias_of(self.causal_mask_BTT, torch.bfloat16)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)


# N targets, M slots per row for them, S = B M slots, D features.


@dataclass(frozen=True)
class TargetPositions:
    """N of the B * T positions, whose outputs are needed."""

    index_N: Tensor
    """int64, increasing: indices into the flattened B * T positions."""

    rows: int
    """B."""

    row_length: int
    """T."""

    max_per_row: int | None = None
    """The largest number of targets in a row, if they are few (masked tokens); None: nearly all positions."""

    @property
    def are_few(self) -> bool:
        """Whether so few positions have a target that computing only these is faster."""
        return self.max_per_row is not None

    @property
    def slots_per_row(self) -> int:
        """M: the largest number of targets in a row, or T."""
        return self.row_length if self.max_per_row is None else self.max_per_row

    def take(self, x_BTD: Tensor) -> Tensor:
        """[N, ...]: `x_BTD` at the targets; [1, T, ...] is broadcast over the rows."""
        index_N = self.index_N if len(x_BTD) == self.rows else self.index_N % self.row_length
        return x_BTD.flatten(0, 1).index_select(0, index_N)

    def spread(self, x_ND: Tensor) -> Tensor:
        """[B, M, ...]: each row's targets, padded with zeros."""
        slots = self.rows * self.slots_per_row
        if len(self.index_N) != slots:
            x_ND = x_ND.new_zeros(slots, *x_ND.shape[1:]).index_copy(0, self._slot_N, x_ND)
        spread_BMD: Tensor = x_ND.unflatten(0, (self.rows, self.slots_per_row))
        return spread_BMD

    def gather(self, x_BMD: Tensor) -> Tensor:
        """[N, ...]: the inverse of `spread`."""
        x_SD = x_BMD.flatten(0, 1)
        return x_SD if len(self.index_N) == len(x_SD) else x_SD.index_select(0, self._slot_N)

    def mask(self, mask_BTT: Tensor) -> Tensor:
        """[B, M, T]: the rows of `mask_BTT` of the targets; True in padding slots."""
        lines_BMT = self.spread(self.take(mask_BTT).to(torch.uint8)).bool()
        return lines_BMT | ~lines_BMT.any(-1, keepdim=True)

    @cached_property
    def _slot_N(self) -> Tensor:
        row_N = self.index_N // self.row_length
        starts_B = torch.searchsorted(row_N, torch.arange(self.rows, device=row_N.device))
        place_N = torch.arange(len(row_N), device=row_N.device) - starts_B[row_N]
        return row_N * self.slots_per_row + place_N


# K slots per row of a token subset.


@dataclass(frozen=True)
class TokenSubset:
    """The `kept` tokens of a batch, the only ones that `layers` compute. The others skip these layers."""

    kept: TargetPositions

    layers: range
    """Consecutive layers, at least one, without the last layer of the encoder."""

    first_layer_sees_all: bool
    """Whether the kept tokens still attend to all tokens in the first of the layers."""

    cu_seqlens: Tensor | None = None
    """Boundaries of the documents in the subset, if they are known."""

    def of(self, x_BTD: Tensor) -> Tensor:
        """[B, K, D]: the kept tokens of each row, padded with zeros."""
        return self.kept.spread(self.kept.take(x_BTD))

    def merge(self, x_BKD: Tensor, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: the kept tokens from `x_BKD`, the others from `x_BTD`."""
        flat = x_BTD.flatten(0, 1).index_copy(0, self.kept.index_N, self.kept.gather(x_BKD))
        return flat.view_as(x_BTD)

    def documents(self, documents: Documents) -> Documents:
        """The documents of the subset. Tokens keep their positions; padding slots are separate documents."""
        rows, slots = self.kept.rows, self.kept.slots_per_row
        positions_BK = self.of(documents.positions_BT[..., None])[..., 0]
        if documents.one_per_row and len(self.kept.index_N) == rows * slots:  # all rows have as many kept tokens
            starts = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=positions_BK.device)
            return Documents(positions_BK, starts, one_per_row=True)
        number_BK = self.of(documents.starts_BT.cumsum(1)[..., None])[..., 0]
        starts_BK = torch.ones_like(number_BK, dtype=torch.bool)
        starts_BK[:, 1:] = number_BK[:, 1:] != number_BK[:, :-1]
        return Documents(positions_BK, self.cu_seqlens, starts_BT=starts_BK)
