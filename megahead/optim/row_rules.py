"""How the rows of a table are updated: a step updates only those with a gradient; others catch up when they have one.

A stale row is one that the last steps did not update, as no batch used it. To catch up is to apply what these steps
would have done to it without a gradient (momentum, weight decay). `touched`: the step of a row's last update.

A row's numbers are `Rows`, n of them together: `weight` [n, D] and its moments, [n, D] or one number per row [n, 1].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from megahead.config import OptimizerConfig
from megahead.optim.pending import Owed, PendingUpdates
from megahead.optim.rates import Floats, Ints, RateHistory

Rows = Mapping[str, Tensor]
Moments = Mapping[str, Literal["each", "row"]]
WEIGHT = "weight"


class RowRule(ABC):
    """Updates rows in place, and remembers the rate of every applied step. Every rank that has rows has one."""

    moments: ClassVar[Moments]
    """Names of what is kept beside a weight: a number for each, or one for the row."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.resume(np.empty(0))

    def resume(self, rates: Floats) -> None:
        """Goes on as if these had been the rates of all steps so far."""
        self.history = RateHistory(self._config.weight_decay, rates)

    @abstractmethod
    def catch_up_(self, rows: Rows, touched_n: Tensor) -> None:
        """Brings rows up to date that were last updated at the steps `touched_n` (int32, on the CPU)."""

    def step_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        """One step at `rate` of rows that have caught up. Ranks without rows to update call it too."""
        self.history.push(rate)
        rows[WEIGHT].mul_(1 - rate * self._config.weight_decay)
        self._update_(rows, gradients_nD, rate)

    @abstractmethod
    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        """The step but for weight decay; the history has it already."""


class DeferredAdamW(RowRule):
    """AdamW to the last digits, as if every row were updated at every step."""

    moments: ClassVar[Moments] = {"exp_avg": "each", "exp_avg_sq": "each"}

    def resume(self, rates: Floats) -> None:
        super().resume(rates)
        self._pending = PendingUpdates(self._config.betas, self._config.eps, self.history)

    def catch_up_(self, rows: Rows, touched_n: Tensor) -> None:
        steps_S, place_n = np.unique(touched_n.numpy().astype(np.int64), return_inverse=True)
        every_term_S = self._pending.needs_every_term(steps_S)
        parts = (~every_term_S, self._pending.owed), (every_term_S, self._pending.owed_term_by_term)
        for wanted_S, owed_by in parts:
            if wanted_S.all():
                _settle_(rows, owed_by(steps_S), place_n)
            elif wanted_S.any():
                new_place_S = np.cumsum(wanted_S) - 1
                these = np.flatnonzero(wanted_S[place_n])
                index = torch.from_numpy(these).to(rows[WEIGHT].device)
                part = {name: values.index_select(0, index) for name, values in rows.items()}
                _settle_(part, owed_by(steps_S[wanted_S]), new_place_S[place_n[these]])
                for name, values in rows.items():
                    values.index_copy_(0, index, part[name])

    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        (b1, b2), step = self._config.betas, self.history.steps
        mean, square = rows["exp_avg"], rows["exp_avg_sq"]
        mean.lerp_(gradients_nD, 1 - b1)
        square.mul_(b2).add_(self._squares(gradients_nD), alpha=1 - b2)
        divisor = (square.sqrt() / math.sqrt(1 - b2**step)).add_(self._config.eps)
        rows[WEIGHT].addcdiv_(mean, divisor, value=-rate / (1 - b1**step))

    def _squares(self, gradients_nD: Tensor) -> Tensor:
        return gradients_nD.square()


class RowwiseAdamW(DeferredAdamW):
    """AdamW with one second moment a row, the mean of its weights': a third lighter."""

    moments: ClassVar[Moments] = {"exp_avg": "each", "exp_avg_sq": "row"}

    def _squares(self, gradients_nD: Tensor) -> Tensor:
        return gradients_nD.square().mean(1, keepdim=True)


class RowwiseAdaGrad(RowRule):
    """AdaGrad with one number a row, the sum of its gradients' mean squares; decay as in AdamW."""

    moments: ClassVar[Moments] = {"square_sum": "row"}

    def catch_up_(self, rows: Rows, touched_n: Tensor) -> None:
        kept_n = torch.from_numpy(self.history.kept(touched_n.numpy(), self.history.steps))
        rows[WEIGHT].mul_(kept_n.to(rows[WEIGHT].device, rows[WEIGHT].dtype)[:, None])

    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        total = rows["square_sum"].add_(gradients_nD.square().mean(1, keepdim=True))
        rows[WEIGHT].addcdiv_(gradients_nD, total.sqrt().add_(self._config.eps), value=-rate)


RULES: Mapping[str, type[RowRule]] = {"adamw": DeferredAdamW, "adamw_row": RowwiseAdamW, "adagrad": RowwiseAdaGrad}


def build_row_rule(name: str, config: OptimizerConfig) -> RowRule:
    """The rule of that name, with the betas, eps and decay of all other weights."""
    return RULES[name](config)


def _settle_(rows: Rows, owed: Owed, place_n: Ints) -> None:
    """Applies what rows are owed; row i stands at `owed`'s step place_n[i]. One pass over them for each summand."""
    weight, mean, square = rows[WEIGHT], rows["exp_avg"], rows["exp_avg_sq"]
    kept, first, second, *summands = _columns(owed.columns(), place_n, weight)
    root, total = square.sqrt(), torch.zeros_like(square)
    for share, offset in zip(summands[0::2], summands[1::2], strict=True):
        total.addcdiv_(share.expand_as(root), root + offset)
    weight.mul_(kept).addcmul_(mean, total, value=-1)
    mean.mul_(first)
    square.mul_(second)


def _columns(values_SC: Floats, place_n: Ints, like: Tensor) -> tuple[Tensor, ...]:
    """C tensors [n, 1] beside `like`: the lines of `values_SC` at `place_n`, in one copy to the device."""
    on_device = torch.from_numpy(values_SC).to(like.device, like.dtype)
    chosen_nC: Tensor = on_device[torch.from_numpy(place_n).to(like.device)]
    return chosen_nC[:, :, None].unbind(1)
