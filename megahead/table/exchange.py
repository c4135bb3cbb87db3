"""Rows on their way: from owners to whom asks, and their gradients back. U, u, S, O, T as in `plan`, D features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import Group
from megahead.table.plan import RowPlan


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
