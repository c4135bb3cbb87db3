"""Applies a model's sharding table: plain layers are replaced by their sharded twins, in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from megahead.distributed import Group
from megahead.parallel.layers import TWINS


def parallelize_(module: nn.Module, sharding: Mapping[str, str], group: Group) -> None:
    """Replaces every layer that a pattern of `sharding` names by its twin over `group`; sends nothing.

    `*` in a pattern stands for one part of a dotted name; "heads" marks an attention layer, which stays as it is but
    learns that other ranks hold other heads. Raises ValueError for a pattern that matches no layer, or a
    layer it cannot split: a table that lies about its model would train slices as if they were whole.
    """
    for pattern, kind in sharding.items():
        matched = list(_matching(module, pattern))
        if not matched:
            raise ValueError(f"the sharding table's pattern {pattern!r} must match a layer of {type(module).__name__}")
        for name in matched:
            _replace_(module, name, kind, group)


def shard_dims(module: nn.Module) -> dict[str, int]:
    """Which dim of which parameter is split over tensor ranks, from the `shard_dims` of the module's layers."""
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, layer in module.named_modules()
        for name, dim in getattr(layer, "shard_dims", {}).items()
    }


def _matching(module: nn.Module, pattern: str) -> Iterator[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return (name for name, _ in module.named_modules() if expression.fullmatch(name))


def _replace_(module: nn.Module, name: str, kind: str, group: Group) -> None:
    layer = module.get_submodule(name)
    if kind == "heads":
        layer.group = group  # type: ignore[assignment]
        return
    plain, twin = TWINS[kind]
    if type(layer) is not plain:
        raise ValueError(f"{name} must be a {plain.__name__} to be split by {kind}, but is a {type(layer).__name__}")
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, twin(layer, group))
