"""What all encoders share: blocks over whole documents, the last of which may be computed for targets alone.

B rows, T tokens a row, t those of them that this rank holds, D hidden size, N targets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from megahead.distributed import gather_from_group
from megahead.models.backbone import Backbone
from megahead.nn import Documents, TargetPositions


class Encoder(Backbone):
    """An encoder says what its first block reads, what each is told, and what becomes of the last one's output."""

    blocks: nn.ModuleList

    @abstractmethod
    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: what the first block reads."""

    @abstractmethod
    def views(self, documents: Documents) -> Sequence[tuple[object, ...]]:
        """For each block, what it is called with beside its input."""

    def normed(self, x: Tensor) -> Tensor:
        """The last block's output after a norm, where there is one."""
        return x

    def encode(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states; see `Backbone.encode`."""
        x_BtD = self.embedded(rows_BTD, documents)
        for block, view in zip(self.blocks, self.views(documents), strict=True):
            x_BtD = self.run_block(block, x_BtD, *view)
        return gather_from_group(self.normed(x_BtD), self.sequence_group, dim=1)

    def encode_at(self, rows_BTD: Tensor, documents: Documents, targets: TargetPositions) -> Tensor:
        """[N, D]: the same at `targets`; where these are few, the last block is computed for them alone.

        Equal to `encode` at these positions; dropout draws other numbers. Ranks that share each row's tokens compute
        all of them.
        """
        if not targets.are_few or self.sequence_group.size > 1:
            return super().encode_at(rows_BTD, documents, targets)
        x_BTD = self.embedded(rows_BTD, documents)
        *body, (last, its_view) = zip(self.blocks, self.views(documents), strict=True)
        for block, view in body:
            x_BTD = self.run_block(block, x_BTD, *view)
        return self.normed(self.run_block(last, x_BTD, *its_view, targets, static_shapes=False))
