"""Which rows a step needs from which rank, and their exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed.group import Group

# Who asks whom for which rows in a step, settled ahead of it.
#
# Rows are sharded round-robin: rank i mod R owns id i, at place i // R, so that frequent ids, which are neighbours in
# most vocabularies, are spread evenly. R ranks; U: ids that this rank needs; u: those that it asks for; S: rows that
# others ask of it (repeats counted); O: how many of these are distinct.
#
# Ranks that need the same ids, a tensor group, ask for every T-th each, and share what comes: u = U / T.


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


# Rows on their way: from owners to whom asks, and their gradients back. U, u, S, O, T as in `plan`, D features.


def rows_from_owners(owned_OD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[U, D]: the rows that this rank needs; `owned_OD`: those that it is asked for. Collective."""
    sent_SD = owned_OD.index_select(0, plan.place_S)
    got_uD = ranks.all_to_all(sent_SD, plan.served, plan.asked)
    share_uD = torch.empty_like(got_uD).index_copy_(0, plan.by_owner_u, got_uD)
    return _joined(share_uD, len(plan.ids_U), plan.sharing)


def gradients_to_owners(gradients_UD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[O, D]: the sums of all ranks' gradients, added in the order of ranks: the same bits each time. Collective."""
    sent_uD = _summed_share(gradients_UD, plan.sharing).index_select(0, plan.by_owner_u)
    got_SD = ranks.all_to_all(sent_uD, plan.asked, plan.served)
    summed_OD = gradients_UD.new_zeros(len(plan.owned_O), gradients_UD.shape[1])
    for part, place in zip(got_SD.split(plan.served), plan.place_S.split(plan.served), strict=True):
        summed_OD.index_add_(0, place, part)  # a rank asks for a row once
    return summed_OD


def _joined(share_uD: Tensor, count: int, sharing: Group) -> Tensor:
    """[U, D]: every T-th row from each rank; `count`: U."""
    if sharing.size == 1:
        return share_uD
    even_uD = F.pad(share_uD, (0, 0, 0, -(-count // sharing.size) - len(share_uD)))  # some ranks have a row less
    return sharing.all_gather(even_uD).transpose(0, 1).flatten(0, 1)[:count]


def _summed_share(gradients_UD: Tensor, sharing: Group) -> Tensor:
    """[u, D]: the sums of every T-th row's gradients over these ranks: the inverse way of `_joined`."""
    if sharing.size == 1:
        return gradients_UD
    count = len(range(sharing.rank, len(gradients_UD), sharing.size))
    even_UD = F.pad(gradients_UD, (0, 0, 0, -len(gradients_UD) % sharing.size))
    return sharing.reduce_scatter(even_UD.unflatten(0, (-1, sharing.size)), dim=1).squeeze(1)[:count]
