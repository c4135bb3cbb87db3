"""Which weights move how: which of them decay, which have a learning rate of their own, and which Muon moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from megahead.config import OptimizerConfig

TABLES = ("embedding.weight", "head.weight")
"""How the names of the embedding and of an untied head end."""

JOINT = ".qkv.weight"
"""How the name of a projection ends that makes queries, keys and values at once; its owner has a `head_size`."""


class Move(NamedTuple):
    """What is the same for all parameters of a group; what is left out decays, at the rate of all, by AdamW."""

    weight_decay: float
    rate_ratio: float = 1.0
    """Learning rate over that of a step."""

    orthogonal: bool = False
    """Whether Muon moves them."""

    joint_head: int | None = None
    """For Muon, of a projection that makes queries, keys and values at once: how many rows each has of a head."""


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: {"params", "names"} and the fields of a `Move`, those that decay first.

    Everything with two dims or more decays, the embedding included; vectors do not. Frozen parameters and empty
    groups are left out; a parameter shared under several names appears once.
    """
    members: dict[Move, list[tuple[str, nn.Parameter]]] = {}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in sorted(trained, key=lambda member: member[1].ndim < 2):
        members.setdefault(_move(module, name, parameter, config), []).append((name, parameter))
    return [
        {"params": [p for _, p in found], "names": [name for name, _ in found], **move._asdict()}
        for move, found in members.items()
    ]


def set_learning_rate(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """The rate of the next step, for each group times its own ratio."""
    for group in groups:
        group["lr"] = learning_rate * group.get("rate_ratio", 1.0)


def _move(module: nn.Module, name: str, parameter: Tensor, config: OptimizerConfig) -> Move:
    if parameter.ndim < 2:
        return Move(weight_decay=0.0)
    if name.endswith(TABLES):
        return Move(config.weight_decay, config.table.learning_rate_ratio)
    if config.name == "muon" and "blocks." in name:
        joint_head = _joint_head(module, name)
        return Move(config.weight_decay, config.muon.learning_rate_ratio, orthogonal=True, joint_head=joint_head)
    return Move(config.weight_decay)


def _joint_head(module: nn.Module, name: str) -> int | None:
    if not name.endswith(JOINT):
        return None
    attention: Any = module.get_submodule(name.removesuffix(JOINT))
    return int(attention.head_size)
