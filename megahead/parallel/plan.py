"""Applies a model's sharding table: plain layers are replaced by their sharded twins, in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from megahead.distributed import Group
from megahead.errors import ConfigError
from megahead.parallel.layers import TWINS, Twins
from megahead.parallel.sequence import SEQUENCE_TWINS

_MARKS = {"heads": "group", "tokens": "sequence_group"}
"""The attribute through which a module that is not replaced gets the group."""


def parallelize_(module: nn.Module, sharding: Mapping[str, str], group: Group, *, sequence: bool = False) -> None:
    """Replaces every layer that a pattern of `sharding` names by its twin over `group`; sends nothing.

    `*` in a pattern stands for one part of a dotted name, "" for `module` itself. "heads" names an attention layer,
    which is not replaced but told that other ranks have other heads; "key_heads" layers that may have fewer heads than
    there are ranks; "head_norm" norms of each head. With `sequence` tokens are split as well: "tokens" names modules
    that are told that other ranks have other tokens, "norm" the norms between them.
    Raises ValueError for a pattern that matches no layer, or a layer that has no such twin: with a wrong table, slices
    would train as if they were full weights.
    """
    if sequence and "tokens" not in sharding.values():
        raise ConfigError("parallel.sequence", f"be false for a {type(module).__name__}", got="true")
    twins = SEQUENCE_TWINS if sequence else TWINS
    for pattern, kind in sharding.items():
        matched = list(_matching(module, pattern))
        if not matched:
            raise ValueError(f"the sharding table's pattern {pattern!r} must match a layer of {type(module).__name__}")
        if sequence or kind not in ("tokens", "norm"):
            for name in matched:
                _apply_(module, name, kind, twins, group)


def shard_dims(module: nn.Module) -> dict[str, int]:
    """Which dim of which parameter is split over tensor ranks, from the `shard_dims` of the module's layers."""
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, layer in module.named_modules()
        for name, dim in getattr(layer, "shard_dims", {}).items()
        if getattr(layer, name) is not None  # a layer may have no bias
    }


def _matching(module: nn.Module, pattern: str) -> Iterator[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return (name for name, _ in module.named_modules() if expression.fullmatch(name))


def _apply_(module: nn.Module, name: str, kind: str, twins: Twins, group: Group) -> None:
    layer = module.get_submodule(name)
    if kind in _MARKS:
        setattr(layer, _MARKS[kind], group)
        return
    if type(layer) not in twins[kind]:
        plain = " or ".join(dict.fromkeys(known.__name__ for known in twins[kind]))
        raise ValueError(f"{name} must be a {plain} to be split by {kind}, but is a {type(layer).__name__}")
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, twins[kind][type(layer)](layer, group))
