"""What all encoders share: blocks over whole documents, the last of which may be computed for targets alone.

B rows, T tokens a row, t those of them that this rank holds, D hidden size, N targets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from megahead.distributed import gather_from_group
from megahead.models.backbone import Backbone
from megahead.nn import Documents, ShorterRows, TargetPositions


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
        self,
        rows_BTD: Tensor,
        documents: Documents,
        targets: TargetPositions,
        shorter: Sequence[ShorterRows] = (),
    ) -> Tensor:
        """[N, D]: the same at `targets`; where these are few, the last block is computed for them alone.

        Equal to `encode` at these positions; dropout draws other numbers. Ranks that share each row's tokens compute
        all of them. `shorter`: what some layers before the last one compute alone, in the order of these layers.
        """
        if not shorter and (not targets.are_few or self.sequence_group.size > 1):
            return super().encode_at(rows_BTD, documents, targets)
        x_BTD, views, done, last = self.embedded(rows_BTD, documents), self.views(documents), 0, len(self.blocks) - 1
        for part in shorter:
            before = slice(done, part.layers.start)
            x_BTD = self._through(self.blocks[before], views[before], x_BTD)
            x_BTD = part.joined(self._alone(part, x_BTD, documents), x_BTD)
            done = part.layers.stop
        x_BTD = self._through(self.blocks[done:last], views[done:last], x_BTD)
        if not targets.are_few:
            return self.normed(targets.take(self.run_block(self.blocks[last], x_BTD, *views[last])))
        return self.normed(self.run_block(self.blocks[last], x_BTD, *views[last], targets, static_shapes=False))

    def _alone(self, part: ShorterRows, x_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, K, D]: what the layers of `part` make of its tokens."""
        first, stop = part.layers.start, part.layers.stop
        if part.first_reads_all:
            view = self.views(documents)[first]
            kept_ND = self.run_block(self.blocks[first], x_BTD, *view, part.kept, static_shapes=False)
            x_BKD, first = part.kept.spread(kept_ND), first + 1
        else:
            x_BKD = part.of(x_BTD)
        views = self.views(part.documents(documents))
        return self._through(self.blocks[first:stop], views[first:stop], x_BKD, static_shapes=False)

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
