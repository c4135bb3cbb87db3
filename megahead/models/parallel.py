"""Tensor and sequence parallelism: parallel layers, and the sharding tables that select the layers to replace."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed.group import Group, copy_to_group, reduce_from_group, reduce_scatter_to_group
from megahead.errors import ConfigError
from megahead.models.blocks import HeadsLinear
from megahead.models.layers import Embedding, LayerNorm, RMSNorm, layer_norm, look_up, rms_norm

# Parallel layers: each computes the function of a plain layer with the weights split over a tensor group.
#
# It is built from the plain layer, also on the meta device, and has the same parameter names. `shard_dims` maps split
# parameters to the split dim; they have `model_parallel = True`, so that the global gradient norm includes each slice,
# and replicated parameters once. After Shoeybi et al. 2019, arXiv 1909.08053.
#
# B rows, T tokens, D hidden size, V vocabulary, U scattered ids; lower case: this rank's share.


ParallelLayerFactory = Callable[..., nn.Module]
"""Builds a parallel layer from the plain layer and the group."""


def _keep_layer(layer: nn.Module, _: Group) -> nn.Module:
    return layer


def _shard_parameter(tensor: Tensor, group: Group, dim: int) -> nn.Parameter:
    parameter = nn.Parameter(group.shard(tensor.detach(), dim))
    parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


class ColumnParallelLinear(nn.Module):
    """`y = x W.T + b` with the output features split over `group`.

    Every rank reads all of `x` and returns its slice of `y`. With the following `RowParallelLinear` it costs one
    all-reduce of [B, T, D] forward and one backward.
    """

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}
    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _shard_parameter(layer.weight, group, 0)
        self.bias = None if layer.bias is None else _shard_parameter(layer.bias, group, 0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, f]: this rank's output features."""
        return F.linear(copy_to_group(x_BTD, self.group), *self.local_parameters())

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """[f, D] and [f]: weight and bias of this rank's output features."""
        return self.weight, self.bias


class ReplicatedHeadsLinear(ColumnParallelLinear):
    """A column layer with fewer heads than ranks (grouped queries): consecutive ranks return the same head.

    Every rank has the weights of all heads and uses one of them; gradients are summed over the group, so that the
    replicas stay equal. Costs an all-reduce of the weight, which is small compared to [B, T, D].
    """

    shard_dims: ClassVar[Mapping[str, int]] = {}

    def __init__(self, layer: HeadsLinear, group: Group) -> None:
        nn.Module.__init__(self)
        self.group, self.heads = group, layer.heads
        self.weight, self.bias = layer.weight, layer.bias

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's head."""
        size = self.weight.shape[0] // self.heads
        first = self.group.rank * self.heads // self.group.size * size
        weight_fD = copy_to_group(self.weight, self.group)[first : first + size]
        return weight_fD, None if self.bias is None else copy_to_group(self.bias, self.group)[first : first + size]


class RowParallelLinear(nn.Module):
    """`y = x W.T + b` with the input features split over `group`; the bias is replicated, and added after the sum."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(self, layer: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _shard_parameter(layer.weight, group, 1)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())

    def forward(self, x_BTf: Tensor) -> Tensor:
        """[B, T, D] on every rank, from this rank's input features."""
        summed_BTD = reduce_from_group(F.linear(x_BTf, self.weight), self.group)
        return summed_BTD if self.bias is None else summed_BTD + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """A table whose rows are split over `group`: rank r owns the ids from r * v on."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, layer: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = _shard_parameter(layer.weight, group, 0)

    def forward(self, ids: Tensor, scattered_ids_U: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[..., D]: rows of `ids` on every rank, by an all-reduce.

        With `scattered_ids_U` also [u, D]: the rows of this rank's even share of these ids, whichever ranks own them,
        by a reduce-scatter whose backward gathers. U must be a multiple of the group's size; the row of id -1 is zero.
        """
        if scattered_ids_U is None:
            return reduce_from_group(self._local_rows(ids), self.group)
        rows = self._local_rows(torch.cat([ids.flatten(), scattered_ids_U]))
        rows, scattered = rows.split([ids.numel(), scattered_ids_U.numel()])
        return reduce_from_group(rows.unflatten(0, ids.shape), self.group), reduce_scatter_to_group(
            scattered, self.group
        )

    def _local_rows(self, ids: Tensor) -> Tensor:
        """The rows of the ids that this rank owns, zeros for other ids."""
        count = self.weight.shape[0]
        local = ids - self.group.rank * count
        is_remote = (local < 0) | (local >= count)
        rows = look_up(local.masked_fill(is_remote, 0), self.weight)
        return rows.masked_fill(is_remote[..., None], 0.0)


class ReplicatedRMSNorm(nn.Module):
    """An RMS norm of this rank's heads or tokens, with a replicated weight. Autograd sums the weight's gradients over
    the ranks, because DeepSpeed reads gradients as soon as they are computed."""

    def __init__(self, layer: RMSNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.eps, self.zero_centered = layer.eps, layer.zero_centered
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., D]; an all-reduce of [D] backward."""
        return rms_norm(x, copy_to_group(self.weight, self.group), self.eps, self.zero_centered)


def _choose_by_heads(split: ParallelLayerFactory, replicated: ParallelLayerFactory) -> ParallelLayerFactory:
    """`split` where the heads are divisible by the ranks, else `replicated`."""
    return lambda layer, group: (split if layer.heads % group.size == 0 else replicated)(layer, group)


LayerTable = Mapping[str, Mapping[type[nn.Module], ParallelLayerFactory]]

PARALLEL_LAYERS: LayerTable = {
    "column": {nn.Linear: ColumnParallelLinear},
    "key_heads": {HeadsLinear: _choose_by_heads(ColumnParallelLinear, ReplicatedHeadsLinear)},
    "head_norm": {RMSNorm: ReplicatedRMSNorm, nn.Identity: _keep_layer},
    "row": {nn.Linear: RowParallelLinear},
    "vocabulary": {Embedding: VocabularyParallelEmbedding, nn.Embedding: VocabularyParallelEmbedding},
}
"""For each style of a sharding table, the plain layer classes that it supports, and their parallel layers."""


# Sequence parallelism: outside attention and MLP, each tensor rank has a share of every row's tokens.
#
# Norms, dropout and the residual stream, which tensor parallelism replicates, are split along the tokens. An all-gather
# before a column layer and a reduce-scatter after a row layer replace the all-reduces, with the same number of bytes.
# After Korthikanti et al. 2022, arXiv 2205.05198.
#
# B rows, T tokens, t of one rank, D hidden size, f features of one rank.


class SequenceColumnLinear(ColumnParallelLinear):
    """Maps this rank's tokens to this rank's features of all tokens.

    Costs an all-gather of [B, T, D] forward; backward another one (so that only [B, t, D] is saved) and a
    reduce-scatter.
    """

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, T, f]: this rank's output features."""
        inputs = _cast_for_autocast(x_BtD, *self.local_parameters())
        output_BTf: Tensor = _GatheredLinear.apply(*inputs, self.group)
        return output_BTf


class SequenceReplicatedHeadsLinear(ReplicatedHeadsLinear, SequenceColumnLinear):
    """`SequenceColumnLinear` with fewer heads than ranks."""


class SequenceRowLinear(RowParallelLinear):
    """Maps this rank's features of all tokens to its tokens: a reduce-scatter forward, an all-gather backward."""

    def forward(self, x_BTf: Tensor) -> Tensor:
        """[B, t, D]: this rank's tokens."""
        summed_BtD = reduce_scatter_to_group(F.linear(x_BTf, self.weight), self.group, dim=1)
        return summed_BtD if self.bias is None else summed_BtD + copy_to_group(self.bias, self.group)


class SequenceLayerNorm(nn.Module):
    """A layer norm of this rank's tokens; sums the gradients of its weights over the ranks as `ReplicatedRMSNorm`."""

    def __init__(self, layer: nn.LayerNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, t, D]; an all-reduce of [2, D] backward, or of [1, D] without a bias."""
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        weight, *bias = copy_to_group(torch.stack(parameters), self.group)
        return layer_norm(x_BtD, weight, bias[0] if bias else None, self.eps)


SEQUENCE_PARALLEL_LAYERS: LayerTable = {
    **PARALLEL_LAYERS,
    "column": {nn.Linear: SequenceColumnLinear},
    "key_heads": {HeadsLinear: _choose_by_heads(SequenceColumnLinear, SequenceReplicatedHeadsLinear)},
    "row": {nn.Linear: SequenceRowLinear},
    "norm": {
        LayerNorm: SequenceLayerNorm,
        nn.LayerNorm: SequenceLayerNorm,
        RMSNorm: ReplicatedRMSNorm,
        nn.Identity: _keep_layer,
    },
}
"""`PARALLEL_LAYERS` with sequence parallelism."""


class _GatheredLinear(torch.autograd.Function):
    """`linear` over all ranks' tokens; saves only this rank's, and gathers all again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, weight_fD: Tensor, bias_f: Tensor | None, group: Group) -> Tensor:
        ctx.group, ctx.has_bias = group, bias_f is not None
        ctx.save_for_backward(x_BtD, weight_fD)
        return F.linear(group.unshard(x_BtD, dim=1), weight_fD, bias_f)

    @staticmethod
    def backward(ctx: Any, grad_BTf: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # type: ignore[override]
        x_BtD, weight_fD = ctx.saved_tensors
        grad_Nf, x_ND = grad_BTf.flatten(0, 1), ctx.group.unshard(x_BtD, dim=1).flatten(0, 1)
        grad_BtD = ctx.group.reduce_scatter(grad_BTf @ weight_fD, dim=1)
        return grad_BtD, grad_Nf.T @ x_ND, grad_Nf.sum(0) if ctx.has_bias else None, None


def _cast_for_autocast(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """The tensors cast to autocast's dtype, as for `linear`; unchanged outside of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *parameters)]


# The common parts of the families' sharding tables. Layers outside the tables are replicated.


WEIGHT_SHARDING = {
    "embedding": "vocabulary",  # rows of the table
    "blocks.*.attention": "heads",  # each rank has its own dropout masks
    "blocks.*.attention.output": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
HEAD_SHARDING = {
    "blocks.*.attention.query": "column",  # whole heads
    "blocks.*.attention.key": "key_heads",
    "blocks.*.attention.value": "key_heads",
}
TOKEN_SHARDING = {
    "": "tokens",
    "blocks.*": "tokens",  # each rank has its own dropout masks
    "blocks.*.attention_norm": "norm",
    "blocks.*.mlp_norm": "norm",
    "final_norm": "norm",
}
"""Under sequence parallelism only."""

_GROUP_ATTRIBUTES = {"heads": "group", "tokens": "sequence_group"}
"""Styles that do not replace a module, but set this attribute of it to the group."""


def parallelize_(module: nn.Module, sharding: Mapping[str, str], group: Group, *, sequence: bool = False) -> None:
    """Replaces every layer that matches a pattern of `sharding` by its parallel layer over `group`, without
    communication.

    `*` in a pattern matches one part of a dotted name, "" is `module` itself. Styles: "heads" is an attention layer,
    which is not replaced, but gets the group that splits its heads; "key_heads" are layers that may have
    fewer heads than there are ranks; "head_norm" are norms of each head. With `sequence` tokens are split as well:
    "tokens" are modules that get the group that splits the tokens, "norm" are norms of these tokens.
    Raises ValueError for a pattern without a match or a layer without a parallel layer: with a wrong table, slices
    would train as if they were full weights.
    """
    if sequence and "tokens" not in sharding.values():
        raise ConfigError("parallel.sequence", f"be false for a {type(module).__name__}", got="true")
    table = SEQUENCE_PARALLEL_LAYERS if sequence else PARALLEL_LAYERS
    for pattern, style in sharding.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for name, _ in module.named_modules() if expression.fullmatch(name)]
        if not matched:
            raise ValueError(f"the sharding table's pattern {pattern!r} must match a layer of {type(module).__name__}")
        if sequence or style not in ("tokens", "norm"):
            for name in matched:
                _parallelize_layer_(module, name, style, table, group)


def shard_dims(module: nn.Module) -> dict[str, int]:
    """The split dim of each parameter split over tensor ranks, from the `shard_dims` of the module's layers."""
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, layer in module.named_modules()
        for name, dim in getattr(layer, "shard_dims", {}).items()
        if getattr(layer, name) is not None  # a layer may have no bias
    }


def _parallelize_layer_(module: nn.Module, name: str, style: str, table: LayerTable, group: Group) -> None:
    layer = module.get_submodule(name)
    if style in _GROUP_ATTRIBUTES:
        setattr(layer, _GROUP_ATTRIBUTES[style], group)
        return
    if type(layer) not in table[style]:
        plain = " or ".join(dict.fromkeys(layer_class.__name__ for layer_class in table[style]))
        raise ValueError(f"{name} must be a {plain} to be split by {style}, but is a {type(layer).__name__}")
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, table[style][type(layer)](layer, group))
