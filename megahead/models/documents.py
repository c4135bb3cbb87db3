"""The structure of a batch: packed documents, target positions, and token subsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# Each value of `Documents` is computed on first use, and shared by all blocks. B rows, T tokens per row, S documents in
# all rows (a document does not continue in the next row).


T = TypeVar("T")


class _LazyProperty(Generic[T]):
    """A `functools.cached_property` that `torch.compile` can trace. Traced code computes it anew, without caching."""

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
    """int64: position of each token in its document, from 0; may be [1, T] if each row is one document."""

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
        Passing `cu_seqlens` saves a synchronization with the GPU."""
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

    def with_window(self, window: int) -> Documents:
        """The documents with sliding-window attention of `window` tokens to each side."""
        if self.positions_BT.shape[1] <= window + 1:  # no row is longer
            return self
        starts_BT = None if self.one_per_row else self.starts_BT
        return Documents(
            self.positions_BT, self.cu_seqlens, one_per_row=self.one_per_row, window=window, starts_BT=starts_BT
        )

    @property
    def needs_mask(self) -> bool:
        """Whether some tokens of a row do not attend to each other."""
        return not self.one_per_row or self.window is not None

    @_LazyProperty
    def starts_BT(self) -> Tensor:
        """True at the first token of each document, and of each row."""
        starts_BT = self.positions_BT == 0
        starts_BT[:, 0] = True
        return starts_BT

    @_LazyProperty
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: start of each document in the flattened B*T tokens, then B*T, and B*T once
        more for each empty document of `padded_cu_seqlens`.

        Synchronizes with the GPU unless passed to the constructor.
        """
        starts_S = self.starts_BT.flatten().nonzero().flatten()
        return F.pad(starts_S, (0, 1), value=self.starts_BT.numel()).to(torch.int32)

    def padded_cu_seqlens(self, multiple: int) -> Tensor:
        """`cu_seqlens` padded to a multiple by empty documents at the end, so that few shapes are compiled."""
        ends = self.cu_seqlens[-1:].expand(-len(self.cu_seqlens) % multiple)
        return torch.cat([self.cu_seqlens, ends])

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
        position_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        return same_BTT & ((position_T[:, None] - position_T).abs() <= self.window)

    @_LazyProperty
    def causal_mask_BTT(self) -> Tensor:
        """True where a decoder's token (dim 1) attends to a token (dim 2): itself and earlier ones in its document."""
        return self.mask_BTT.tril()

    @_LazyProperty
    def bf16_bias_BTT(self) -> Tensor:
        """`mask_BTT` as an additive bf16 bias."""
        return mask_to_bias(self.mask_BTT, torch.bfloat16)

    @_LazyProperty
    def causal_bf16_bias_BTT(self) -> Tensor:
        """`causal_mask_BTT` as an additive bf16 bias."""
        return mask_to_bias(self.causal_mask_BTT, torch.bfloat16)


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive bias: 0 where `mask` is True, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)


# N targets, padded to M slots per row, S = B M slots, D features.


@dataclass(frozen=True)
class TargetPositions:
    """The N of B * T positions whose outputs are needed."""

    index_N: Tensor
    """int64, increasing: indices into the flattened B * T positions."""

    rows: int
    """B."""

    row_length: int
    """T."""

    max_per_row: int | None = None
    """The largest number of targets in a row, if they are sparse (masked tokens); None: nearly all positions."""

    @property
    def are_sparse(self) -> bool:
        """Whether computing only the targets is faster than all positions."""
        return self.max_per_row is not None

    @property
    def slots_per_row(self) -> int:
        """M: the largest number of targets in a row, or T."""
        return self.row_length if self.max_per_row is None else self.max_per_row

    def select(self, x_BTD: Tensor) -> Tensor:
        """[N, ...]: `x_BTD` at the targets; [1, T, ...] is broadcast over the rows."""
        index_N = self.index_N if len(x_BTD) == self.rows else self.index_N % self.row_length
        return x_BTD.flatten(0, 1).index_select(0, index_N)

    def pad(self, x_ND: Tensor) -> Tensor:
        """[B, M, ...]: each row's targets, padded with zeros."""
        num_slots = self.rows * self.slots_per_row
        if len(self.index_N) != num_slots:
            x_ND = x_ND.new_zeros(num_slots, *x_ND.shape[1:]).index_copy(0, self.slot_N, x_ND)
        padded_BMD: Tensor = x_ND.unflatten(0, (self.rows, self.slots_per_row))
        return padded_BMD

    def unpad(self, x_BMD: Tensor) -> Tensor:
        """[N, ...]: the inverse of `pad`."""
        x_SD = x_BMD.flatten(0, 1)
        return x_SD if len(self.index_N) == len(x_SD) else x_SD.index_select(0, self.slot_N)

    def mask(self, mask_BTT: Tensor) -> Tensor:
        """[B, M, T]: the targets' rows of `mask_BTT`; True in padding slots."""
        mask_BMT = self.pad(self.select(mask_BTT).to(torch.uint8)).bool()
        return mask_BMT | ~mask_BMT.any(-1, keepdim=True)

    @cached_property
    def slot_N(self) -> Tensor:
        """int64 [N]: the index of each target's slot among the B M of `pad`."""
        row_N = self.index_N // self.row_length
        starts_B = torch.searchsorted(row_N, torch.arange(self.rows, device=row_N.device))
        slot_in_row_N = torch.arange(len(row_N), device=row_N.device) - starts_B[row_N]
        return row_N * self.slots_per_row + slot_in_row_N


# K slots per row of a token subset.


@dataclass(frozen=True)
class TokenSubset:
    """The tokens of a batch to which some layers are restricted; the other tokens skip these layers."""

    positions: TargetPositions
    """The tokens of the subset."""

    layers: range
    """One or more consecutive layers, without the encoder's last."""

    first_layer_attends_to_all: bool
    """Whether the subset still attends to all tokens in the first of the layers."""

    cu_seqlens: Tensor | None = None
    """Boundaries of the documents in the subset, if they are precomputed."""

    def select(self, x_BTD: Tensor) -> Tensor:
        """[B, K, D]: the subset's tokens of each row, padded with zeros."""
        return self.positions.pad(self.positions.select(x_BTD))

    def merge(self, x_BKD: Tensor, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: the subset's tokens from `x_BKD`, the others from `x_BTD`."""
        flat = x_BTD.flatten(0, 1).index_copy(0, self.positions.index_N, self.positions.unpad(x_BKD))
        return flat.view_as(x_BTD)

    def select_documents(self, documents: Documents) -> Documents:
        """The documents of the subset. Tokens keep their positions; the padding of a row is a
        document of its own."""
        rows, slots = self.positions.rows, self.positions.slots_per_row
        positions_BK = self.select(documents.positions_BT[..., None])[..., 0]
        if documents.one_per_row and len(self.positions.index_N) == rows * slots:  # no padding slots
            cu_seqlens = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=positions_BK.device)
            return Documents(positions_BK, cu_seqlens, one_per_row=True)
        document_BK = self.select(documents.starts_BT.cumsum(1)[..., None])[..., 0]
        starts_BK = torch.ones_like(document_BK, dtype=torch.bool)
        starts_BK[:, 1:] = document_BK[:, 1:] != document_BK[:, :-1]
        return Documents(positions_BK, self.cu_seqlens, starts_BT=starts_BK)
