"""Optimizers: parameter groups, learning-rate schedules, AdamW and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megahead.config.training import OptimizerConfig, ScheduleConfig
from megahead.distributed.group import has_fast_bf16

# Parameter groups: weight decay, learning rate and optimizer of each parameter.


EMBEDDING_NAMES = ("backbone.embedding.weight", "head.weight")
"""The names of the embedding and of an untied head."""

QKV_SUFFIX = ".qkv.weight"
"""End of the name of a fused QKV projection, whose module has a `head_size`."""


class GroupOptions(NamedTuple):
    """The options of a parameter group."""

    weight_decay: float
    learning_rate_ratio: float = 1.0
    """Its learning rate over the optimizer's."""

    is_muon: bool = False
    """Whether Muon updates it, not AdamW. Not named `use_muon`, a key that DeepSpeed reads for its own Muon."""

    qkv_head_size: int | None = None
    """For Muon: the head size of a fused QKV projection."""


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: {"params", "names"} and the fields of `GroupOptions`, those that decay first.

    Parameters with two dims or more decay, the embedding included; vectors do not. Frozen parameters and empty groups
    are left out; a parameter shared under several names appears once.
    """
    members_by_options: dict[GroupOptions, list[tuple[str, nn.Parameter]]] = {}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in sorted(trained, key=lambda member: member[1].ndim < 2):
        members_by_options.setdefault(_group_options(module, name, parameter, config), []).append((name, parameter))
    return [
        {"params": [p for _, p in members], "names": [name for name, _ in members], **options._asdict()}
        for options, members in members_by_options.items()
    ]


def set_learning_rate(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Sets the learning rate of the next step, times the ratio of each group."""
    for group in groups:
        group["lr"] = learning_rate * group.get("learning_rate_ratio", 1.0)


def _group_options(module: nn.Module, name: str, parameter: Tensor, config: OptimizerConfig) -> GroupOptions:
    if parameter.ndim < 2:
        return GroupOptions(weight_decay=0.0)
    if name in EMBEDDING_NAMES:
        return GroupOptions(config.weight_decay, config.table.learning_rate_ratio)
    if config.name == "muon" and "blocks." in name:
        attention: Any = module.get_submodule(name.removesuffix(QKV_SUFFIX)) if name.endswith(QKV_SUFFIX) else None
        head_size = None if attention is None else int(attention.head_size)
        ratio = config.muon.learning_rate_ratio
        return GroupOptions(config.weight_decay, ratio, is_muon=True, qkv_head_size=head_size)
    return GroupOptions(config.weight_decay)


# Learning-rate schedules: each is a function, listed in `SCHEDULES`.


def learning_rate_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate as a share of its peak, for the update that follows `step` finished ones (0: the first update).

    Warm-up is linear and reaches the peak at its last step, so no update has rate 0; the schedule's decay follows.
    After the last step the ratio does not change.
    """
    warmup = schedule.num_warmup_steps(total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - (1.0 - schedule.final_ratio) * SCHEDULES[schedule.name](schedule, step, total_steps - 1)


def cosine(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Decays along half a cosine to the last step."""
    return (1 - math.cos(math.pi * triangular(schedule, step, last))) / 2


def triangular(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Decays linearly to the last step."""
    return _progress(max(schedule.num_warmup_steps(last + 1) - 1, 0), step, last)


def constant(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Does not decay."""
    return 0.0


def wsd(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Warmup-stable-decay: linear over the last `decay_steps`."""
    return _progress(last - schedule.num_decay_steps(last + 1), step, last)


DecayFunction = Callable[[ScheduleConfig, int, int], float]
"""How much, 0 to 1, of the decay from the peak to `final_ratio` is done at a step after warm-up. Arguments: the
settings, the step, the last step."""

SCHEDULES: Mapping[str, DecayFunction] = {"cosine": cosine, "triangular": triangular, "constant": constant, "wsd": wsd}
"""By `schedule.name`."""


def _progress(start: int, step: int, last: int) -> float:
    """The finished share of the steps from `start` to `last`."""
    return min(max((step - start) / max(last - start, 1), 0.0), 1.0)


# Muon: the update of a matrix is its orthogonalized momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
#
# It equals torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv 2502.16982), which needs full
# matrices: ZeRO and tensor parallelism partition them.


UpdateFunction = Callable[[Tensor, Tensor, int | None], Tensor]
"""Computes the update of a parameter of the optimizer from the parameter, its momentum and its `qkv_head_size`."""

MOMENTUM = "exp_avg"
"""Muon's only moment of a weight: a running mean of gradients, as AdamW's first moment."""

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.AdamW):
    """Muon for parameter groups with `is_muon`, AdamW for the others."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> None:
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
        self._momentum = config.muon.momentum
        self.compute_update: UpdateFunction = lambda parameter, momentum, head_size: orthogonalize(momentum, head_size)
        """An engine that partitions parameters replaces it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["is_muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group["is_muon"] else ():
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
        update = self.compute_update(parameter, gradient.lerp(momentum, self._momentum), group.get("qkv_head_size"))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def orthogonalize(matrix: Tensor, qkv_head_size: int | None = None) -> Tensor:
    """The nearest orthogonal matrix, approximately, in fp32 and scaled to the RMS of AdamW's updates.

    `qkv_head_size`: `matrix` is a fused QKV projection, whose rows are those of q, k and v of one head after the other;
    q, k and v are orthogonalized separately.
    """
    if qkv_head_size is None:
        return _newton_schulz(matrix)
    qkv = matrix.unflatten(0, (-1, 3, qkv_head_size)).transpose(0, 1)
    updates = _newton_schulz(qkv.flatten(1, 2)).view_as(qkv)
    return updates.transpose(0, 1).flatten(0, 2)


def _newton_schulz(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration in bf16 on one matrix or a batch; singular values end between 0.7 and 1.2. Where bf16 is
    slow, products are computed in fp32 and rounded to bf16 (docs/optimizer.md); only the order of sums differs."""
    a, b, c = _COEFFICIENTS
    add_product: Callable[..., Tensor] = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    dtype = torch.bfloat16 if has_fast_bf16(matrices.device) else torch.float32

    def round_bf16(x: Tensor) -> Tensor:
        return x.bfloat16().to(dtype)

    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = round_bf16(matrices.mT if is_tall else matrices)
    x = round_bf16(x / round_bf16(x.norm(dim=(-2, -1), keepdim=True)).clamp(min=_EPS))
    for _ in range(_ITERATIONS):
        gram = round_bf16(x @ x.mT)
        x = round_bf16(add_product(x, round_bf16(add_product(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return (x.mT if is_tall else x).float() * (0.2 * math.sqrt(max(matrices.shape[-2:])))


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of the trained parameters of `module`; AdamW is fused on CPU and CUDA.

    Measured on a CPU core with pythia-14m's shapes: fused 2.4 ms a step, foreach 21 ms, for-loop 18 ms; weights differ
    by at most 1.5e-8 after 23 steps.
    """
    groups = parameter_groups(module, config)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    if config.name == "muon":
        return Muon(groups, config, fused=fused)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
