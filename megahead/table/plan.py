"""Who asks whom for which rows in a step, settled ahead of it.

Rows are dealt out: id i lies with rank i mod R at place i // R, so that frequent ids, which stand together in most
vocabularies, are spread evenly. R ranks; U: ids that this rank needs; S: rows it serves, O of them different ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megahead.distributed import Group


@dataclass(frozen=True)
class RowPlan:
    """One rank's part in the exchange of rows of one step."""

    ids_U: Tensor
    """int64: the ids that it needs, increasing, each once."""

    by_owner_U: Tensor
    """int64: their numbers, owner by owner."""

    asked: list[int]
    """Rows that it asks of each rank."""

    served: list[int]
    """Rows that each rank asks of it."""

    owned_O: Tensor
    """int64: places among its own rows of those that anybody asks for, increasing, each once."""

    place_S: Tensor
    """int64: of each row that it serves, asker by asker, the number among these."""

    lookups: int
    """Forward passes of the step; the gradients of the last complete it."""

    def to(self, device: torch.device) -> RowPlan:
        """The same on `device`."""
        names = ("ids_U", "by_owner_U", "owned_O", "place_S")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_rows(ids: Tensor, ranks: Group, lookups: int = 1) -> RowPlan:
    """The plan of a step that needs `ids` (int64 on the CPU, any number of times). Collective over `ranks`, which must
    carry CPU tensors: a number for each rank, and 4 bytes an id."""
    ids_U = torch.unique(ids)
    owners_U = ids_U % ranks.size
    by_owner_U = torch.argsort(owners_U, stable=True)
    asked = torch.bincount(owners_U, minlength=ranks.size)
    served = ranks.all_to_all(asked).tolist()
    wanted_S = ranks.all_to_all(ids_U[by_owner_U].int(), asked.tolist(), served).long()
    owned_O, place_S = torch.unique(wanted_S // ranks.size, return_inverse=True)
    return RowPlan(ids_U, by_owner_U, asked.tolist(), served, owned_O, place_S, lookups)
