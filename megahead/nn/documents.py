"""Where documents begin in a batch of packed rows, in the forms that attention back ends ask for.

Made once per forward pass and shared by all blocks; each form is computed when it is first asked for.
B rows, T tokens a row, S documents in all rows together (a document ends with its row at the latest).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


class Documents:
    """The documents of a batch, read from positions that restart at 0 with each of them.

    `cu_seqlens`, where they are known already, save a GPU from telling the host how many there are.
    """

    def __init__(self, positions_BT: Tensor, cu_seqlens: Tensor | None = None) -> None:
        self.starts_BT = positions_BT == 0
        self.starts_BT[:, 0] = True
        if cu_seqlens is not None:
            self.cu_seqlens = cu_seqlens

    @staticmethod
    def cu_seqlens_of_rows(rows: int, length: int, device: torch.device) -> Tensor:
        """`cu_seqlens` where each row is one document."""
        return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: first token of each document in the flattened B*T tokens, then B*T.

        Synchronises a GPU unless given.
        """
        starts_S = self.starts_BT.flatten().nonzero().flatten()
        return F.pad(starts_S, (0, 1), value=self.starts_BT.numel()).to(torch.int32)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, in order; they sum to B*T. Synchronises a GPU."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @cached_property
    def same_document_BTT(self) -> Tensor:
        """True where two tokens are of one document."""
        document_BT = self.starts_BT.cumsum(1)
        return document_BT[:, :, None] == document_BT[:, None, :]

    @cached_property
    def causal_mask_BTT(self) -> Tensor:
        """True where a token (dim 1) of a decoder sees a token (dim 2): itself and what precedes it in its document."""
        return self.same_document_BTT.tril()
