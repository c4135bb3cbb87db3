"""Bad steps: how they are found, in which micro-batches, and what is done about them; the same on every rank.

A step is skipped before the optimizer sees it if its loss is not finite, or is a spike and the config does more than
note it. The engine skips a step whose gradients are not finite. Shapes: W ranks, A accumulation steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from megahead.config import FaultsConfig
from megahead.engine import StepResult

Kind = Literal["loss not finite", "gradients not finite", "overflow", "spike"]
Action = Literal["apply", "skip", "rollback", "stop"]
_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution is this many times its median absolute deviation."""


@dataclass(frozen=True)
class Fault:
    """What was wrong with a step, and in which micro-batches."""

    kind: Kind
    places: tuple[tuple[int, int], ...]
    """(world rank, micro-step) of every loss that is not finite, or of a spike's highest loss; empty for gradients."""


def robust_score(value: float, others: list[float]) -> float:
    """How many standard deviations `value` is above the median of `others`. The standard deviation is estimated from
    the median absolute deviation, so that single outliers do not matter, and is at least 1 % of the median."""
    middle = median(others)
    deviation = _OF_NORMAL * median([abs(other - middle) for other in others])
    return (value - middle) / max(deviation, 0.01 * abs(middle), 1e-12)


class Guard:
    """Judges steps by the config's rules. `recent_losses` belong to the training state: they survive a restart."""

    def __init__(self, rules: FaultsConfig) -> None:
        self._rules = rules
        self.in_a_row = 0
        """Bad steps since the last good one."""
        self._rollbacks = 0

    def suspects(self, losses_WA: Tensor, recent_losses: list[float]) -> Fault | None:
        """The fault, if any, that the losses [W, A] of all micro-batches show before the optimizer's step."""
        finite_WA = losses_WA.isfinite()
        if not finite_WA.all():
            return Fault("loss not finite", _places(~finite_WA))
        enough = len(recent_losses) >= self._rules.spike_window // 4
        if enough and robust_score(float(losses_WA.mean()), recent_losses) > self._rules.spike_score:
            return Fault("spike", _places(losses_WA == losses_WA.max()))
        return None

    def must_skip(self, fault: Fault | None) -> bool:
        """Whether the step must not be applied."""
        return fault is not None and (fault.kind != "spike" or self._rules.spike != "note")

    def decide(self, fault: Fault | None) -> Action:
        """What to do about a step; counts bad steps in a row."""
        kind = None if fault is None else fault.kind
        policies = {None: "apply", "overflow": "skip", "spike": self._rules.spike}
        policy = policies.get(kind, self._rules.bad_step)
        if policy in ("apply", "note"):
            self.in_a_row = 0
            return "apply"
        self.in_a_row += 1
        self._rollbacks += policy == "rollback"
        if max(self.in_a_row, self._rollbacks) >= self._rules.most_in_a_row:
            return "stop"
        return policy  # type: ignore[return-value]

    def may_roll_back(self) -> bool:
        """Counts a rollback for another reason than a bad step; whether it is one of those that are allowed."""
        self._rollbacks += 1
        return self._rollbacks < self._rules.most_in_a_row

    def saved(self) -> None:
        """To be called after a save: rollbacks to the new checkpoint are counted from 0."""
        self._rollbacks = 0

    def remember(self, loss: float, recent_losses: list[float]) -> None:
        """Adds the loss of an applied step, and drops the oldest beyond the window."""
        recent_losses.append(loss)
        del recent_losses[: -self._rules.spike_window]


def found_afterwards(result: StepResult, dynamic_loss_scale: bool) -> Fault | None:
    """The fault, if any, that the engine found although the losses were fine: gradients that are not finite."""
    if result.applied:
        return None
    overflow = dynamic_loss_scale and not isfinite(result.grad_norm)
    return Fault("overflow" if overflow else "gradients not finite", ())


def _places(bad_WA: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((int(rank), int(step)) for rank, step in torch.nonzero(bad_WA).tolist())
