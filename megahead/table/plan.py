"""Who asks whom for which rows in a step, settled ahead of it.

Rows are sharded round-robin: rank i mod R owns id i, at place i // R, so that frequent ids, which are neighbours in
most vocabularies, are spread evenly. R ranks; U: ids that this rank needs; S: rows that others ask of it (repeats
counted); O: how many of these are distinct.
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
    """int64: the permutation that sorts `ids_U` by owning rank."""

    asked: list[int]
    """How many rows it asks of each rank."""

    served: list[int]
    """How many rows each rank asks of it."""

    owned_O: Tensor
    """int64: indices, among this rank's own rows, of those that any rank asks for; increasing, without repeats."""

    place_S: Tensor
    """int64: for each row that it serves, ordered by asking rank: its index in `owned_O`."""

    num_lookups: int
    """How many forward passes the step has; the last backward pass completes the row gradients."""

    def to(self, device: torch.device) -> RowPlan:
        """The same on `device`."""
        names = ("ids_U", "by_owner_U", "owned_O", "place_S")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_rows(ids: Tensor, ranks: Group, num_lookups: int = 1) -> RowPlan:
    """The plan of a step that needs `ids` (int64 on the CPU, repeats allowed). Collective over `ranks`, which must be a
    group for CPU tensors (gloo): sends one count to each rank, then 4 bytes per id."""
    ids_U = torch.unique(ids)
    owners_U = ids_U % ranks.size
    by_owner_U = torch.argsort(owners_U, stable=True)
    asked = torch.bincount(owners_U, minlength=ranks.size)
    served = ranks.all_to_all(asked).tolist()
    wanted_S = ranks.all_to_all(ids_U[by_owner_U].int(), asked.tolist(), served).long()
    owned_O, place_S = torch.unique(wanted_S // ranks.size, return_inverse=True)
    return RowPlan(ids_U, by_owner_U, asked.tolist(), served, owned_O, place_S, num_lookups)
