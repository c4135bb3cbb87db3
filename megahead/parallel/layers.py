"""Sharded twins of plain layers: the same function, but each rank of a tensor group has a slice of the weights.

A twin is made from its plain layer, on the meta device too, and keeps its parameters' names. `shard_dims` names which
dim of which parameter is split; split parameters carry `model_parallel = True`, so that the global gradient norm
counts each slice, and all others once. After Shoeybi et al. 2019, arXiv 1909.08053.

B rows, T tokens, D hidden size, V vocabulary, U shared ids; lower case: this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed import Group, copy_to_group, reduce_from_group, reduce_scatter_to_group
from megahead.nn import Embedding, HeadsLinear, RMSNorm, look_up


def _slice(full: Tensor, group: Group, dim: int) -> nn.Parameter:
    parameter = nn.Parameter(group.shard(full.detach(), dim))
    parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


class ColumnParallelLinear(nn.Module):
    """`y = x W.T + b` with the output features split over `group`.

    Every rank reads all of `x` and returns its own slice of `y`. Follow it with a `RowParallelLinear`: the pair costs
    one all-reduce of [B, T, D] forward and one backward.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}
    weight: Tensor
    bias: Tensor | None

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _slice(full.weight, group, 0)
        self.bias = None if full.bias is None else _slice(full.bias, group, 0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, f]: this rank's output features."""
        return F.linear(copy_to_group(x_BTD, self.group), *self.own())

    def own(self) -> tuple[Tensor, Tensor | None]:
        """[f, D] and [f]: weight and bias of this rank's output features."""
        return self.weight, self.bias


class SharedHeadsLinear(ColumnParallelLinear):
    """A column layer with fewer heads than there are ranks (grouped queries): consecutive ranks return the same head.

    Every rank has the weights of all heads and uses one of them; gradients are summed over the group, so that its
    copies stay equal. Costs an all-reduce of the weight, which is small beside [B, T, D].
    """

    shard_dims: ClassVar[Mapping[str, int]] = {}

    def __init__(self, full: HeadsLinear, group: Group) -> None:
        nn.Module.__init__(self)
        self.group, self.heads = group, full.heads
        self.weight, self.bias = full.weight, full.bias

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's head."""
        size = self.weight.shape[0] // self.heads
        first = self.group.rank * self.heads // self.group.size * size
        weight_fD = copy_to_group(self.weight, self.group)[first : first + size]
        return weight_fD, None if self.bias is None else copy_to_group(self.bias, self.group)[first : first + size]


class RowParallelLinear(nn.Module):
    """`y = x W.T + b` with the input features split over `group`; the bias, whole on every rank, is added once."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _slice(full.weight, group, 1)
        self.bias = None if full.bias is None else nn.Parameter(full.bias.detach().clone())

    def forward(self, x_BTf: Tensor) -> Tensor:
        """[B, T, D] on every rank, from this rank's input features."""
        summed_BTD = reduce_from_group(F.linear(x_BTf, self.weight), self.group)
        return summed_BTD if self.bias is None else summed_BTD + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """A table whose rows are split over `group`: rank r owns the ids from r * v on."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, full: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _slice(full.weight, group, 0)

    def forward(self, ids: Tensor, scattered_ids_U: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[..., D]: rows of `ids` on every rank, by an all-reduce.

        With `scattered_ids_U` also [u, D]: the rows of this rank's even share of these ids, whichever ranks own them,
        by a reduce-scatter whose backward gathers. U must be a multiple of the group's size; an id of -1 gives zeros.
        """
        if scattered_ids_U is None:
            return reduce_from_group(self._owned(ids), self.group)
        rows = self._owned(torch.cat([ids.flatten(), scattered_ids_U]))
        inputs, shared = rows.split([ids.numel(), scattered_ids_U.numel()])
        return reduce_from_group(inputs.view(*ids.shape, -1), self.group), reduce_scatter_to_group(shared, self.group)

    def _owned(self, ids: Tensor) -> Tensor:
        """Rows of the ids that this rank owns, zeros for other ids."""
        count = self.weight.shape[0]
        local = ids - self.group.rank * count
        foreign = (local < 0) | (local >= count)
        rows = look_up(local.masked_fill(foreign, 0), self.weight)
        return rows.masked_fill(foreign[..., None], 0.0)


class SharedRMSNorm(nn.Module):
    """A norm whose weight is also used for other ranks' heads or tokens; its gradients are summed over the ranks, so
    that their copies stay equal.

    The sum is part of autograd, because DeepSpeed takes gradients as soon as they are computed.
    """

    def __init__(self, full: RMSNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.normalized_shape, self.eps = full.normalized_shape, full.eps
        self.weight = full.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., D]; an all-reduce of [D] backward."""
        weight = copy_to_group(self.weight, self.group).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _split_heads(full: HeadsLinear, group: Group) -> nn.Module:
    return ColumnParallelLinear(full, group) if full.heads % group.size == 0 else SharedHeadsLinear(full, group)


def unchanged(layer: nn.Module, _: Group) -> nn.Module:
    """The twin of a layer that does nothing."""
    return layer


Twins = Mapping[str, Mapping[type[nn.Module], Callable[..., nn.Module]]]

TWINS: Twins = {
    "column": {nn.Linear: ColumnParallelLinear},
    "key_heads": {HeadsLinear: _split_heads},
    "head_norm": {RMSNorm: SharedRMSNorm, nn.Identity: unchanged},  # where a model has them
    "row": {nn.Linear: RowParallelLinear},
    "vocabulary": {Embedding: VocabularyParallelEmbedding, nn.Embedding: VocabularyParallelEmbedding},
}
"""For each word of a sharding table: which plain layers it may name, and the twin of each."""
