"""Who asks whom for which rows in a step, settled ahead of it.

Rows are sharded round-robin: rank i mod R owns id i, at place i // R, so that frequent ids, which are neighbours in
most vocabularies, are spread evenly. R ranks; U: ids that this rank needs; u: those that it asks for; S: rows that
others ask of it (repeats counted); O: how many of these are distinct.

Ranks that need the same ids, a tensor group, ask for every T-th each, and share what comes: u = U / T.
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

    sharing: Group
    """T ranks that need the same ids. Its rank t asks for `ids_U[t::T]`."""

    by_owner_u: Tensor
    """int64: the permutation that sorts the ids it asks for by owning rank."""

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
        names = ("ids_U", "by_owner_u", "owned_O", "place_S")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_rows(ids: Tensor, ranks: Group, num_lookups: int = 1, sharing: Group | None = None) -> RowPlan:
    """The plan of a step that needs `ids` (int64 on the CPU, repeats allowed), the same ones on all ranks of `sharing`.

    Collective over `ranks`, which must be a group for CPU tensors (gloo): sends one count to each rank, then 4 bytes
    per id. Nothing is sent over `sharing` yet.
    """
    ids_U, sharing = torch.unique(ids), sharing or Group()
    asked_u = ids_U[sharing.rank :: sharing.size]
    owners_u = asked_u % ranks.size
    by_owner_u = torch.argsort(owners_u, stable=True)
    asked = torch.bincount(owners_u, minlength=ranks.size)
    served = ranks.all_to_all(asked).tolist()
    wanted_S = ranks.all_to_all(asked_u[by_owner_u].int(), asked.tolist(), served).long()
    owned_O, place_S = torch.unique(wanted_S // ranks.size, return_inverse=True)
    return RowPlan(ids_U, sharing, by_owner_u, asked.tolist(), served, owned_O, place_S, num_lookups)
