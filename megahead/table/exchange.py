"""Rows on their way: from owners to whom asks, and their gradients back. U, S, O as in `plan`, D features."""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.table.plan import RowPlan


def rows_from_owners(owned_OD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[U, D]: the rows that this rank asked for; `owned_OD`: those that it is asked for. Collective."""
    sent_SD = owned_OD.index_select(0, plan.place_S)
    got_UD = ranks.all_to_all(sent_SD, plan.served, plan.asked)
    return torch.empty_like(got_UD).index_copy_(0, plan.by_owner_U, got_UD)


def gradients_to_owners(gradients_UD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[O, D]: the sums of all ranks' gradients, added in the order of ranks: the same bits each time. Collective."""
    sent_UD = gradients_UD.index_select(0, plan.by_owner_U)
    got_SD = ranks.all_to_all(sent_UD, plan.asked, plan.served)
    summed_OD = gradients_UD.new_zeros(len(plan.owned_O), gradients_UD.shape[1])
    for part, place in zip(got_SD.split(plan.served), plan.place_S.split(plan.served), strict=True):
        summed_OD.index_add_(0, place, part)  # a rank asks for a row once
    return summed_OD
