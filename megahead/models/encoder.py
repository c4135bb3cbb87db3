"""What all encoders share: blocks over whole documents, the last of which may be computed for targets alone.

B rows, T tokens a row, t those of them that this rank holds, D hidden size, N targets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from megahead.distributed import gather_from_group
from megahead.models.backbone import Backbone
from megahead.nn import Documents, LateTokens, TargetPositions


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
        x_BtD = self._through(self.blocks, self.views(documents), self.embedded(rows_BTD, documents))
        return gather_from_group(self.normed(x_BtD), self.sequence_group, dim=1)

    def encode_at(
        self, rows_BTD: Tensor, documents: Documents, targets: TargetPositions, late: LateTokens | None = None
    ) -> Tensor:
        """[N, D]: the same at `targets`; where these are few, the last block is computed for them alone.

        Equal to `encode` at these positions; dropout draws other numbers. Ranks that share each row's tokens compute
        all of them. `late` tokens enter behind the first layers, as they were embedded.
        """
        if late is None and (not targets.are_few or self.sequence_group.size > 1):
            return super().encode_at(rows_BTD, documents, targets)
        x_BTD, first, last = self.embedded(rows_BTD, documents), 0, len(self.blocks) - 1
        if late is not None:
            first, views = late.layers, self.views(late.documents(documents))
            early_BKD = self._through(self.blocks[:first], views[:first], late.without(x_BTD), static_shapes=False)
            x_BTD = late.joined(early_BKD, x_BTD)
        views = self.views(documents)
        x_BTD = self._through(self.blocks[first:last], views[first:last], x_BTD)
        if not targets.are_few:
            return self.normed(targets.take(self.run_block(self.blocks[last], x_BTD, *views[last])))
        return self.normed(self.run_block(self.blocks[last], x_BTD, *views[last], targets, static_shapes=False))

    def _through(
        self,
        blocks: Iterable[nn.Module],
        views: Sequence[tuple[object, ...]],
        x_BtD: Tensor,
        static_shapes: bool = True,
    ) -> Tensor:
        """[B, t, D]: the last of the blocks' outputs."""
        for block, view in zip(blocks, views, strict=True):
            x_BtD = self.run_block(block, x_BtD, *view, static_shapes=static_shapes)
        return x_BtD
