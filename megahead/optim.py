"""Optimizers: parameter groups, learning-rate schedules, AdamW and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megahead.config.training import OptimizerConfig, ScheduleConfig
from megahead.distributed.group import has_fast_bf16

# Which weights move how: which of them decay, which have a learning rate of their own, and which Muon moves.


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
    members_by_move: dict[Move, list[tuple[str, nn.Parameter]]] = {}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in sorted(trained, key=lambda member: member[1].ndim < 2):
        members_by_move.setdefault(_move(module, name, parameter, config), []).append((name, parameter))
    return [
        {"params": [p for _, p in members], "names": [name for name, _ in members], **move._asdict()}
        for move, members in members_by_move.items()
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
        attention: Any = module.get_submodule(name.removesuffix(JOINT)) if name.endswith(JOINT) else None
        joint_head = None if attention is None else int(attention.head_size)
        return Move(config.weight_decay, config.muon.learning_rate_ratio, orthogonal=True, joint_head=joint_head)
    return Move(config.weight_decay)


# The learning rate over a run, as a share of its peak: each schedule a function, and a line in `SCHEDULES`.


def learning_rate_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Share of the peak rate for the update after `step` finished ones (0 is the first update), in [0, 1].

    Warm-up is linear and ends with the peak at its last step, so no update is made at rate 0. From there
    the rate falls as `SCHEDULES` says. Beyond the last step the ratio does not change.
    """
    warmup = schedule.num_warmup_steps(total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - (1.0 - schedule.final_ratio) * SCHEDULES[schedule.name](schedule, step, total_steps - 1)


def cosine(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Half a cosine from the peak to the last step."""
    return (1 - math.cos(math.pi * triangular(schedule, step, last))) / 2


def triangular(schedule: ScheduleConfig, step: int, last: int) -> float:
    """A line from the peak to the last step."""
    return _progress(max(schedule.num_warmup_steps(last + 1) - 1, 0), step, last)


def constant(schedule: ScheduleConfig, step: int, last: int) -> float:
    """The peak throughout."""
    return 0.0


def wsd(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Stable at the peak, then a line over the last `decay_steps`."""
    return _progress(last - schedule.num_decay_steps(last + 1), step, last)


DecayFunction = Callable[[ScheduleConfig, int, int], float]
"""Of the way from the peak to `final_ratio`, how much lies behind at a step after warm-up, 0 to 1; arguments: the
settings, the step, and the last step, beyond which it is what it was there."""

SCHEDULES: Mapping[str, DecayFunction] = {"cosine": cosine, "triangular": triangular, "constant": constant, "wsd": wsd}
"""By `schedule.name`."""


def _progress(start: int, step: int, last: int) -> float:
    """Share of the steps from `begin` to `last` that lie behind."""
    return min(max((step - start) / max(last - start, 1), 0.0), 1.0)


# Muon: a matrix moves by its momentum made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
#
# Its update is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv 2502.16982),
# which cannot be taken itself: it needs whole matrices, and ZeRO and tensor ranks leave pieces of them.


UpdateFunction = Callable[[Tensor, Tensor, int | None], Tensor]
"""From what the optimizer holds as one parameter, its momentum and its group's `joint_head` to its update."""

MOMENTUM = "exp_avg"
"""A running mean of gradients, as AdamW's first moment is; all that Muon keeps beside a weight."""

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for the parameter groups that are `orthogonal`."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> None:
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
        self._momentum = config.muon.momentum
        self.whole_update: UpdateFunction = lambda held, momentum, joint_head: scaled_orthogonal(momentum, joint_head)
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
        return _orthogonalize(matrix)
    qkv = matrix.unflatten(0, (-1, 3, joint_head)).transpose(0, 1)
    updates = _orthogonalize(qkv.flatten(1, 2)).view_as(qkv)
    return updates.transpose(0, 1).flatten(0, 2)


def _orthogonalize(matrices: Tensor) -> Tensor:
    """Of a matrix, or of several at once: Newton and Schulz's iteration in bf16, whose singular values come out between
    0.7 and 1.2. Where bf16 is slow its numbers are multiplied in fp32 and each result is rounded (docs/optimizer.md):
    the same but for the order of sums."""
    a, b, c = _COEFFICIENTS
    add_product: Callable[..., Tensor] = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    held = torch.bfloat16 if has_fast_bf16(matrices.device) else torch.float32

    def rounded(numbers: Tensor) -> Tensor:
        return numbers.bfloat16().to(held)

    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = rounded(matrices.mT if tall else matrices)
    wide = rounded(wide / rounded(wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=_EPS))
    for _ in range(_ITERATIONS):
        gram = rounded(wide @ wide.mT)
        wide = rounded(add_product(wide, rounded(add_product(gram, gram, gram, beta=b, alpha=c)), wide, beta=a))
    return (wide.mT if tall else wide).float() * (0.2 * math.sqrt(max(matrices.shape[-2:])))


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Over the trained parameters of `module`; torch's AdamW is one fused kernel on CPU and CUDA.

    Measured on a CPU core with pythia-14m's shapes: fused 2.4 ms a step, foreach 21 ms, one by one 18 ms; the results
    differ by at most 1.5e-8 after 23 steps.
    """
    groups = parameter_groups(module, config)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    if config.name == "muon":
        return Muon(groups, config, fused=fused)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
