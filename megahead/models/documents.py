"""What a batch's rows hold beside ids: documents and positions, which outputs have a target, rows with fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# Each form of `Documents` is computed when it is first needed, and shared by all blocks. B rows, T tokens a row, S
# documents in all rows together (a document ends with its row at the latest).


Form = TypeVar("Form")


class _Once(Generic[Form]):
    """As `functools.cached_property`, whose lock `torch.compile` cannot trace; a block that is traced computes it for
    itself."""

    def __init__(self, compute: Callable[[Any], Form]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, documents: object, owner: type) -> Form:
        form = self.compute(documents)
        if not torch.compiler.is_compiling():
            documents.__dict__[self.compute.__name__] = form
        return form


class Documents:
    """Where each document of a batch begins. Tokens attend to their own document alone, or to a part of it."""

    positions_BT: Tensor
    """int64: place of each token in its document, 0 at the first; [1, T] where each row is one document."""

    one_per_row: bool
    """Whether each row is one document."""

    window: int | None
    """How many tokens to each side a token sees, as flash-attn's `window_size`; None: all of its document."""

    def __init__(
        self,
        positions_BT: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        one_per_row: bool = False,
        window: int | None = None,
        starts_BT: Tensor | None = None,
    ) -> None:
        """`positions_BT` restart at 0 with each document, unless `starts_BT` says where documents begin. `cu_seqlens`,
        where they are known already, save a synchronisation with the GPU."""
        self.positions_BT, self.one_per_row, self.window = positions_BT, one_per_row, window
        if starts_BT is not None:
            self.starts_BT = starts_BT
        if cu_seqlens is not None:
            self.cu_seqlens = cu_seqlens

    @staticmethod
    def whole_rows(rows: int, row_length: int, device: torch.device | None = None) -> Documents:
        """Each row is one document. Needs neither a mask nor a synchronisation."""
        positions_1T = torch.arange(row_length, device=device)[None]
        cu_seqlens = torch.arange(0, rows * row_length + 1, row_length, dtype=torch.int32, device=device)
        return Documents(positions_1T, cu_seqlens, one_per_row=True)

    def within(self, window: int) -> Documents:
        """The same documents, in which a token sees `window` tokens to each side: local attention."""
        if self.positions_BT.shape[1] <= window + 1:  # no row is longer
            return self
        starts_BT = None if self.one_per_row else self.starts_BT
        return Documents(
            self.positions_BT, self.cu_seqlens, one_per_row=self.one_per_row, window=window, starts_BT=starts_BT
        )

    @property
    def need_no_mask(self) -> bool:
        """Whether all tokens of a row see each other, so that no mask is needed."""
        return self.one_per_row and self.window is None

    @_Once
    def starts_BT(self) -> Tensor:
        """True at the first token of each document, and of each row."""
        starts_BT = self.positions_BT == 0
        starts_BT[:, 0] = True
        return starts_BT

    @_Once
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: first token of each document in the flattened B*T tokens, then B*T (again for each document
        that is empty: `padded_cu_seqlens`).

        Synchronises with a GPU unless it was given.
        """
        starts_S = self.starts_BT.flatten().nonzero().flatten()
        return F.pad(starts_S, (0, 1), value=self.starts_BT.numel()).to(torch.int32)

    def padded_cu_seqlens(self, multiple: int) -> Tensor:
        """`cu_seqlens` with empty documents at the end, so that its length is a multiple: few shapes to compile for."""
        return F.pad(self.cu_seqlens, (0, -len(self.cu_seqlens) % multiple), value=self.starts_BT.numel())

    @_Once
    def lengths(self) -> list[int]:
        """Tokens of each document, in order; they sum to B*T. Synchronises with a GPU."""
        return [length for length in self.cu_seqlens.diff().tolist() if length]

    @_Once
    def mask_BTT(self) -> Tensor:
        """True where two tokens of an encoder see each other: they are of one document, and within the window;
        [1, T, T] where each row is one document."""
        document_BT = self.starts_BT.cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        if self.window is None:
            return same_BTT
        place_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        return same_BTT & ((place_T[:, None] - place_T).abs() <= self.window)

    @_Once
    def causal_mask_BTT(self) -> Tensor:
        """True where a token (dim 1) of a decoder sees a token (dim 2): itself and what precedes it in its document."""
        return self.mask_BTT.tril()

    @_Once
    def half_bias_BTT(self) -> Tensor:
        """`mask_BTT` as what is added to scores in bf16."""
        return bias_of(self.mask_BTT, torch.bfloat16)

    @_Once
    def causal_half_bias_BTT(self) -> Tensor:
        """`causal_mask_BTT` as what is added to scores in bf16."""
        return bias_of(self.causal_mask_BTT, torch.bfloat16)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)


# N targets, M slots per row for them, S = B M slots, D features.


@dataclass(frozen=True)
class TargetPositions:
    """N of the B * T positions: those whose outputs are wanted."""

    index_N: Tensor
    """int64, increasing: positions in the B rows back to back."""

    rows: int
    """B."""

    row_length: int
    """T."""

    max_per_row: int | None = None
    """Most targets that one row has, where they are few (an encoder's masked tokens); None: about every position."""

    @property
    def are_few(self) -> bool:
        """Whether so few positions have a target that computing them alone pays."""
        return self.max_per_row is not None

    @property
    def slots_per_row(self) -> int:
        """M: the largest number of targets in a row, or T."""
        return self.row_length if self.max_per_row is None else self.max_per_row

    def take(self, x_BTD: Tensor) -> Tensor:
        """[N, ...]: `x_BTD` at the targets; [1, T, ...] is the same in all rows."""
        index_N = self.index_N if len(x_BTD) == self.rows else self.index_N % self.row_length
        return x_BTD.flatten(0, 1).index_select(0, index_N)

    def spread(self, x_ND: Tensor) -> Tensor:
        """[B, M, ...]: each row's targets in its first slots, zeros in the others."""
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
        """[B, M, T]: the lines of `mask_BTT` that belong to the targets; unused slots see everything."""
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
    """The `kept` tokens of a batch, which are alone in `layers`; the others are behind these what they were before."""

    kept: TargetPositions

    layers: range
    """Consecutive ones, at least one, and not the last of the encoder."""

    first_reads_all: bool
    """Whether the kept tokens still see the others in the first of the layers."""

    cu_seqlens: Tensor | None = None
    """Of the shorter rows' documents, where they are known already."""

    def of(self, x_BTD: Tensor) -> Tensor:
        """[B, K, D]: the kept tokens, in the first slots of each row; zeros in those that are left."""
        return self.kept.spread(self.kept.take(x_BTD))

    def joined(self, x_BKD: Tensor, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: the kept tokens as these layers have left them, the others as in `x_BTD`."""
        flat = x_BTD.flatten(0, 1).index_copy(0, self.kept.index_N, self.kept.gather(x_BKD))
        return flat.view_as(x_BTD)

    def documents(self, documents: Documents) -> Documents:
        """Those of the shorter rows: tokens keep their positions; slots that are left are documents of their own."""
        rows, slots = self.kept.rows, self.kept.slots_per_row
        positions_BK = self.of(documents.positions_BT[..., None])[..., 0]
        if documents.one_per_row and len(self.kept.index_N) == rows * slots:  # all rows have as many kept tokens
            starts = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=positions_BK.device)
            return Documents(positions_BK, starts, one_per_row=True)
        number_BK = self.of(documents.starts_BT.cumsum(1)[..., None])[..., 0]
        starts_BK = torch.ones_like(number_BK, dtype=torch.bool)
        starts_BK[:, 1:] = number_BK[:, 1:] != number_BK[:, :-1]
        return Documents(positions_BK, self.cu_seqlens, starts_BT=starts_BK)
