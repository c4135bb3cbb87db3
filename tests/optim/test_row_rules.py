"""Rows that are updated only when they are used end where updating all of them at every step leads."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.training import OptimizerConfig
from megahead.sharded_embedding.optimizer import ROW_OPTIMIZERS, RowOptimizer
from support.long import long

ROWS, WIDTH, STEPS, PEAK = 400, 6, 1000, 3e-3
Rates = Callable[[int], float]


def cosine(step: int) -> float:
    return PEAK * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def with_jumps(step: int) -> float:
    """No warm-up, and ten times as high or as low from one step to the next."""
    return PEAK * (1.0, 0.1, 0.3, 0.03)[step // 250]


def optimizer_config(betas: tuple[float, float], decay: float, eps: float = 1e-8) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=1.0, betas=betas, eps=eps, weight_decay=decay)


class LateTable:
    """A table whose rows are updated when they are used, as an owner of rows does it."""

    def __init__(self, rule: str, config: OptimizerConfig, start: Tensor) -> None:
        self.row_optimizer: RowOptimizer = ROW_OPTIMIZERS[rule](config)
        widths = {"element": start.shape[1], "row": 1}
        moments = {name: torch.zeros(len(start), widths[kind]) for name, kind in self.row_optimizer.moments.items()}
        self.rows = {"weight": start.clone(), **moments}
        self.last_step = torch.zeros(len(start), dtype=torch.int32)

    def step(self, ids: Tensor, gradients: Tensor, rate: float) -> None:
        used = {name: values[ids] for name, values in self.rows.items()}
        self.row_optimizer.apply_pending_updates_(used, self.last_step[ids])
        self.row_optimizer.step_(used, gradients, rate)
        for name, values in self.rows.items():
            values[ids] = used[name]
        self.last_step[ids] = self.row_optimizer.history.steps

    def go_on_from(self, other: LateTable) -> None:
        """From what a checkpoint holds of another table."""
        self.rows = {name: values.clone() for name, values in other.rows.items()}
        self.last_step = other.last_step.clone()
        self.row_optimizer.resume(other.row_optimizer.history.rates)

    def now(self) -> dict[str, Tensor]:
        copies = {name: values.clone() for name, values in self.rows.items()}
        self.row_optimizer.apply_pending_updates_(copies, self.last_step)
        return copies


def gradients_of(steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Unique ids by Zipf's law and their clipped gradients, of all sizes, those of some rows below any sensible eps."""
    generator = np.random.default_rng(seed)
    share = 1 / np.arange(1, ROWS + 1)
    sizes = torch.from_numpy(10.0 ** generator.uniform(-7, -1, ROWS)).float()
    drawn = []
    for _ in range(steps):
        ids = torch.from_numpy(np.unique(generator.choice(ROWS, 24, p=share / share.sum())))
        values = torch.from_numpy(generator.standard_normal((len(ids), WIDTH))).float() * sizes[ids, None]
        drawn.append((ids, values * min(1.0, 0.3 / float(values.norm()))))
    return drawn


def dense(config: OptimizerConfig, start: Tensor, course: list[tuple[Tensor, Tensor]], rates: list[float]) -> Tensor:
    """[weight, exp_avg, exp_avg_sq] of torch's own AdamW, all rows at every step."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [weight], lr=1.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
    weight.grad = torch.zeros_like(weight)
    for (ids, gradients), rate in zip(course, rates, strict=True):
        weight.grad.zero_()
        weight.grad[ids] = gradients
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    state = optimizer.state[weight]
    return torch.stack([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])


def start_of() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) / 4


def trained(rule: str, config: OptimizerConfig, course: list[tuple[Tensor, Tensor]], rates: list[float]) -> LateTable:
    table = LateTable(rule, config, start_of())
    for (ids, gradients), rate in zip(course, rates, strict=True):
        table.step(ids, gradients, rate)
    return table


@pytest.mark.parametrize(
    ("betas", "decay", "eps", "rate"),
    [
        ((0.9, 0.95), 0.1, 1e-8, cosine),
        long((0.9, 0.98), 0.0, 1e-8, cosine),
        long((0.9, 0.999), 0.1, 1e-8, cosine),
        long((0.9, 0.95), 0.0, 1e-6, with_jumps),
        long((0.9, 0.98), 0.1, 1e-8, with_jumps),
        ((0.9, 0.999), 0.0, 1e-8, with_jumps),
        ((0.0, 0.95), 0.1, 1e-8, cosine),
        long((0.9, 0.9), 0.0, 1e-8, cosine),
    ],
)
def test_lazy_adamw_is_dense_adamw(betas: tuple[float, float], decay: float, eps: float, rate: Rates) -> None:
    config, course = optimizer_config(betas, decay, eps), gradients_of(STEPS)
    rates = [rate(step) for step in range(STEPS)]
    table = trained("adamw", config, course, rates)
    assert (table.last_step < STEPS - 250).any(), "no row was stale by more than the window"
    ours, expected = table.now(), dense(config, start_of(), course, rates)
    for values, name in zip(expected, ("weight", "exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(ours[name], values, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    large = expected[2] > 1e-12
    torch.testing.assert_close(ours["exp_avg_sq"][large], expected[2][large], rtol=1e-4, atol=0)


def all_rows(rule: str, config: OptimizerConfig, course: list[tuple[Tensor, Tensor]], rates: list[float]) -> Tensor:
    """The weights that the rules with one number a row lead to, all rows updated at every step, in float64."""
    weight, mean, square = start_of().double(), torch.zeros(ROWS, WIDTH).double(), torch.zeros(ROWS, 1).double()
    b1, b2 = config.betas
    for step, ((ids, values), rate) in enumerate(zip(course, rates, strict=True), start=1):
        gradient = torch.zeros_like(weight)
        gradient[ids] = values.double()
        squares = gradient.square().mean(1, keepdim=True)
        weight *= 1 - rate * config.weight_decay
        if rule == "adagrad":
            square += squares
            weight -= rate * gradient / (square.sqrt() + config.eps)
            continue
        mean = b1 * mean + (1 - b1) * gradient
        square = b2 * square + (1 - b2) * squares
        weight -= rate * (mean / (1 - b1**step)) / ((square / (1 - b2**step)).sqrt() + config.eps)
    return weight


@pytest.mark.parametrize("rule", ["adamw_row", "adagrad"])
def test_rules_with_one_number_a_row_are_what_they_say(rule: str) -> None:
    config, course = optimizer_config((0.9, 0.95), 0.1), gradients_of(600)
    rates = [cosine(step) for step in range(600)]
    expected = all_rows(rule, config, course, rates)
    torch.testing.assert_close(
        trained(rule, config, course, rates).now()["weight"].double(), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("rule", ["adamw", "adamw_row", "adagrad"])
def test_who_goes_on_from_rows_and_rates_goes_on_bitwise(rule: str) -> None:
    """Also back from steps that are taken back; whoever only looks leaves no trace."""
    config, course = optimizer_config((0.9, 0.95), 0.1), gradients_of(500)
    rates = [cosine(step) for step in range(500)]
    table = trained(rule, config, course[:300], rates[:300])
    table.now()
    other = LateTable(rule, config, start_of())
    other.go_on_from(table)
    for ids, gradients in course[100:150]:  # to be taken back
        other.step(ids, gradients, 0.5)
    other.go_on_from(table)
    for each in (table, other):
        for (ids, gradients), rate in zip(course[300:], rates[300:], strict=True):
            each.step(ids, gradients, rate)
    assert all(torch.equal(table.rows[name], other.rows[name]) for name in table.rows)
    assert torch.equal(table.last_step, other.last_step)
