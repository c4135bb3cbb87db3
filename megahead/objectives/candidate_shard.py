"""An even split of the candidates over the ranks of a tensor group.

U candidates of all ranks, w rows on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import Group


@dataclass(frozen=True)
class CandidateShard:
    """This rank's candidates: `count` of them from number `first` on, padded to `width` on every rank."""

    first: int
    count: int
    width: int
    group: Group

    @staticmethod
    def of(total: int, width: int, group: Group) -> CandidateShard:
        """This rank's share of `total` candidates: consecutive ones, `width` per rank until there are no more."""
        first = group.rank * width
        return CandidateShard(first, min(max(total - first, 0), width), width, group)

    def slice(self, bias_U: Tensor | None, elsewhere: float = 0.0) -> Tensor | None:
        """[w]: this rank's slice of all candidates' biases, padded with `elsewhere`."""
        if bias_U is None:
            return None
        return F.pad(bias_U[self.first : self.first + self.count], (0, self.width - self.count), value=elsewhere)
