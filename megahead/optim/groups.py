"""Which weights decay: matrices do, norms and biases do not."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: {"params", "names", "weight_decay"}, those that decay first.

    Everything with two dims or more decays, the embedding included; vectors do not. Frozen parameters and empty
    groups are left out; a parameter shared under several names appears once.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [(name, parameter) for name, parameter in trained if parameter.ndim >= 2]
    vectors = [(name, parameter) for name, parameter in trained if parameter.ndim < 2]
    return [
        {"params": [p for _, p in members], "names": [name for name, _ in members], "weight_decay": decay}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]
