"""Tensor and sequence parallelism: which layers a sharding table replaces, and their parallel forms."""

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
from megahead.models.layers import Embedding, LayerNorm, RMSNorm, layer_norm, look_up

# Parallel forms of plain layers: the same function, but each rank of a tensor group has a slice of the weights.
#
# Each is made from its plain layer, on the meta device too, and keeps its parameters' names. `shard_dims` names which
# dim of which parameter is split; split parameters carry `model_parallel = True`, so that the global gradient
# norm counts each slice, and all others once. After Shoeybi et al. 2019, arXiv 1909.08053.
#
# B rows, T tokens, D hidden size, V vocabulary, U shared ids; lower case: this rank's share.


Form = Callable[..., nn.Module]
"""Makes a layer's parallel form of it and the group."""


def _unchanged(layer: nn.Module, _: Group) -> nn.Module:
    return layer


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
    """A norm whose weight is also used for other ranks' heads or tokens; its gradients are summed over the ranks, by
    autograd, because DeepSpeed takes gradients as soon as they are computed."""

    def __init__(self, full: RMSNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.normalized_shape, self.eps = full.normalized_shape, full.eps
        self.weight = full.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., D]; an all-reduce of [D] backward."""
        weight = copy_to_group(self.weight, self.group).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _split_heads(even: Form, shared: Form) -> Form:
    """`even` where each rank has as many heads, else `shared`."""
    return lambda full, group: (even if full.heads % group.size == 0 else shared)(full, group)


LayerTable = Mapping[str, Mapping[type[nn.Module], Form]]

PARALLEL_LAYERS: LayerTable = {
    "column": {nn.Linear: ColumnParallelLinear},
    "key_heads": {HeadsLinear: _split_heads(ColumnParallelLinear, SharedHeadsLinear)},
    "head_norm": {RMSNorm: SharedRMSNorm, nn.Identity: _unchanged},  # where a model has them
    "row": {nn.Linear: RowParallelLinear},
    "vocabulary": {Embedding: VocabularyParallelEmbedding, nn.Embedding: VocabularyParallelEmbedding},
}
"""For each word of a sharding table: which plain layers it may name, and the parallel form of each."""


# Sequence parallelism: between the split layers of a block, each tensor rank has a share of every row's tokens.
#
# Norms, dropout and the residual stream, which with tensor parallelism alone every rank computes and keeps in full,
# are split along the tokens. An all-gather before a column layer and a reduce-scatter after a row layer replace the
# all-reduces, and send as many bytes. After Korthikanti et al. 2022, arXiv 2205.05198.
#
# B rows, T tokens, t of one rank, D hidden size, f features of one rank.


class SequenceColumnLinear(ColumnParallelLinear):
    """Reads this rank's tokens, returns this rank's features of all tokens.

    Costs an all-gather of [B, T, D] forward; backward another one (so that only [B, t, D] is kept) and a
    reduce-scatter.
    """

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, T, f]: this rank's output features."""
        inputs = _in_autocast_type(x_BtD, *self.own())
        output_BTf: Tensor = _GatheredLinear.apply(*inputs, self.group)
        return output_BTf


class SequenceSharedHeadsLinear(SharedHeadsLinear, SequenceColumnLinear):
    """The same with fewer heads than ranks."""


class SequenceRowLinear(RowParallelLinear):
    """Reads this rank's features of all tokens, returns this rank's tokens: a reduce-scatter forward, an all-gather
    backward."""

    def forward(self, x_BTf: Tensor) -> Tensor:
        """[B, t, D]: this rank's tokens."""
        summed_BtD = reduce_scatter_to_group(F.linear(x_BTf, self.weight), self.group, dim=1)
        return summed_BtD if self.bias is None else summed_BtD + copy_to_group(self.bias, self.group)


class SequenceLayerNorm(nn.Module):
    """A norm of this rank's tokens; the gradients of its weights are summed over the ranks, as in `SharedRMSNorm`."""

    def __init__(self, full: nn.LayerNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.eps = full.eps
        self.weight, self.bias = full.weight, full.bias

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, t, D]; an all-reduce of [2, D] backward, or of [1, D] without a bias."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        weight, *bias = copy_to_group(torch.stack(own), self.group)
        return layer_norm(x_BtD, weight, bias[0] if bias else None, self.eps)


SEQUENCE_PARALLEL_LAYERS: LayerTable = {
    **PARALLEL_LAYERS,
    "column": {nn.Linear: SequenceColumnLinear},
    "key_heads": {HeadsLinear: _split_heads(SequenceColumnLinear, SequenceSharedHeadsLinear)},
    "row": {nn.Linear: SequenceRowLinear},
    "norm": {
        LayerNorm: SequenceLayerNorm,
        nn.LayerNorm: SequenceLayerNorm,
        RMSNorm: SharedRMSNorm,
        nn.Identity: _unchanged,
    },
}
"""The same as `PARALLEL_LAYERS`, if tokens are split too."""


class _GatheredLinear(torch.autograd.Function):
    """`linear` over all ranks' tokens; keeps only this rank's, and gathers the others again in the backward pass."""

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


def _in_autocast_type(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """The tensors in the type that autocast would give to `linear`; unchanged outside of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *parameters)]


# What families have in common; how each splits is its own table. What a table does not name is held in full by every
# rank.


SPLIT_WEIGHTS = {
    "embedding": "vocabulary",  # rows of the table
    "blocks.*.attention": "heads",  # each rank draws its own dropout
    "blocks.*.attention.output": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
SPLIT_HEADS = {
    "blocks.*.attention.query": "column",  # whole heads
    "blocks.*.attention.key": "key_heads",
    "blocks.*.attention.value": "key_heads",
}
SPLIT_TOKENS = {
    "": "tokens",
    "blocks.*": "tokens",  # each rank draws its own dropout
    "blocks.*.attention_norm": "norm",
    "blocks.*.mlp_norm": "norm",
    "final_norm": "norm",
}
"""Under sequence parallelism only."""

_MARKS = {"heads": "group", "tokens": "sequence_group"}
"""The attribute through which a module that is not replaced gets the group."""


def parallelize_(module: nn.Module, sharding: Mapping[str, str], group: Group, *, sequence: bool = False) -> None:
    """Replaces every layer that a pattern of `sharding` names by its parallel form over `group`; sends nothing.

    `*` in a pattern stands for one part of a dotted name, "" for `module` itself. "heads" names an attention layer,
    which is not replaced, but gets the group, whose ranks have the other heads; "key_heads" layers that may have fewer
    heads than there are ranks; "head_norm" norms of each head. With `sequence` tokens are split as well: "tokens" names
    modules that get the group, whose ranks have the other tokens, "norm" the norms between them.
    Raises ValueError for a pattern that matches no layer, or a layer without a parallel form: with a wrong table,
    slices would train as if they were full weights.
    """
    if sequence and "tokens" not in sharding.values():
        raise ConfigError("parallel.sequence", f"be false for a {type(module).__name__}", got="true")
    table = SEQUENCE_PARALLEL_LAYERS if sequence else PARALLEL_LAYERS
    for pattern, kind in sharding.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for name, _ in module.named_modules() if expression.fullmatch(name)]
        if not matched:
            raise ValueError(f"the sharding table's pattern {pattern!r} must match a layer of {type(module).__name__}")
        if sequence or kind not in ("tokens", "norm"):
            for name in matched:
                _apply_(module, name, kind, table, group)


def shard_dims(module: nn.Module) -> dict[str, int]:
    """Which dim of which parameter is split over tensor ranks, from the `shard_dims` of the module's layers."""
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, layer in module.named_modules()
        for name, dim in getattr(layer, "shard_dims", {}).items()
        if getattr(layer, name) is not None  # a layer may have no bias
    }


def _apply_(module: nn.Module, name: str, kind: str, table: LayerTable, group: Group) -> None:
    layer = module.get_submodule(name)
    if kind in _MARKS:
        setattr(layer, _MARKS[kind], group)
        return
    if type(layer) not in table[kind]:
        plain = " or ".join(dict.fromkeys(known.__name__ for known in table[kind]))
        raise ValueError(f"{name} must be a {plain} to be split by {kind}, but is a {type(layer).__name__}")
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, table[kind][type(layer)](layer, group))
