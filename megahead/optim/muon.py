"""Muon: a matrix moves by its momentum made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Its update is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv 2502.16982), which
cannot be taken itself: it needs whole matrices, and ZeRO and tensor ranks leave pieces of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megahead.config import OptimizerConfig
from megahead.distributed import multiplies_bf16_fast

WholeUpdate = Callable[[Tensor, Tensor, int | None], Tensor]
"""From what the optimizer holds as one parameter, its momentum and its group's `joint_head` to its update."""

MOMENTUM = "exp_avg"
"""A running mean of gradients, as AdamW's first moment is; all that Muon keeps beside a weight."""

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for the parameter groups that are `orthogonal`."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> None:
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
        self._momentum = config.muon.momentum
        self.whole_update: WholeUpdate = lambda held, momentum, joint_head: scaled_orthogonal(momentum, joint_head)
        """An engine whose parameters are no whole matrices sets another."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is not None:
                    self._update_(parameter, group)

    def _update_(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.zeros(()), MOMENTUM: torch.zeros_like(parameter)}
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        momentum = state[MOMENTUM].lerp_(gradient, 1 - self._momentum)
        update = self.whole_update(parameter, gradient.lerp(momentum, self._momentum), group.get("joint_head"))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def scaled_orthogonal(matrix: Tensor, joint_head: int | None = None) -> Tensor:
    """fp32 of the shape of `matrix`, about the nearest orthogonal matrix to it, scaled to the size of AdamW's updates.

    `joint_head`: rows make queries, keys and values, so many of each for one head after the other; they are three
    matrices, each treated alone.
    """
    if joint_head is None:
        return _each_orthogonal(matrix)
    three = matrix.unflatten(0, (-1, 3, joint_head)).transpose(0, 1)
    made = _each_orthogonal(three.flatten(1, 2)).view_as(three)
    return made.transpose(0, 1).flatten(0, 2)


def _each_orthogonal(matrices: Tensor) -> Tensor:
    """Of a matrix, or of several at once: Newton and Schulz's iteration in bf16, whose singular values come out between
    0.7 and 1.2. Where bf16 is slow its numbers are multiplied in fp32 and each result is rounded (docs/optimizer.md):
    the same but for the order of sums."""
    a, b, c = _COEFFICIENTS
    add_product: Callable[..., Tensor] = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    held = torch.bfloat16 if multiplies_bf16_fast(matrices.device) else torch.float32

    def rounded(numbers: Tensor) -> Tensor:
        return numbers.bfloat16().to(held)

    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = rounded(matrices.mT if tall else matrices)
    wide = rounded(wide / rounded(wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=_EPS))
    for _ in range(_ITERATIONS):
        gram = rounded(wide @ wide.mT)
        wide = rounded(add_product(wide, rounded(add_product(gram, gram, gram, beta=b, alpha=c)), wide, beta=a))
    return (wide.mT if tall else wide).float() * (0.2 * math.sqrt(max(matrices.shape[-2:])))
