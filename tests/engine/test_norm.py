"""The gradient norm and clipping of stage 0 against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megahead.distributed.group import Group
from megahead.engine import engine as engine_module
from megahead.engine.engine import clip_gradients_, global_norm
from support.forked import forked
from support.small_engine import small_batches, small_engine


def parameters(scale: float) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (), (2, 2))]
    for parameter in made[:3]:  # the last one has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=g) * scale
    return made


@pytest.mark.parametrize(("scale", "largest"), [(2.0, 0.01), (2.0, 1.0), (2.0, 1e6), (1e-7, 1e-8)])
def test_norm_and_clipping_equal_torch(scale: float, largest: float) -> None:
    ours, theirs = parameters(scale), parameters(scale)
    norm = float(global_norm(ours, Group()))
    clip_gradients_(ours, norm, largest)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, largest)), rel=1e-6)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_zero_means_no_limit_and_no_gradients_mean_norm_zero() -> None:
    free = parameters(100.0)
    norm = float(global_norm(free, Group()))
    clip_gradients_(free, norm, 0.0)
    assert global_norm(free, Group()) == norm
    assert global_norm([nn.Parameter(torch.zeros(2))], Group()) == 0.0


def test_a_tensor_rank_whose_gradients_are_all_replicated_adds_zero_on_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Group, "all_reduce_", lambda self, tensor: tensor)
    replicated = nn.Parameter(torch.zeros(2, device="meta"))
    replicated.grad = torch.zeros_like(replicated)
    assert global_norm([replicated], Group(rank=1, size=2)).device == replicated.device


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_makes_the_norm_not_finite(bad: float) -> None:
    given = parameters(1.0)
    assert given[1].grad is not None
    given[1].grad[2] = bad
    assert not math.isfinite(global_norm(given, Group()))


def test_the_norm_is_asked_for_with_the_last_micro_step_so_that_the_host_waits_once() -> None:
    assert forked(norms_asked_for) == [0, 1, 1]


def norms_asked_for() -> list[int]:
    """After the first and the last micro-step of two, and after the step."""
    made, original = [], engine_module.global_norm
    engine_module.global_norm = lambda *given: made.append(original(*given)) or made[-1]
    engine, counts = small_engine(Group(), 0, accumulation=2), []
    for batch in small_batches([6, 6], 1 / 6, seed=0):
        engine.micro_step(batch)
        counts.append(len(made))
    assert engine.step(0.01).grad_norm == float(made[0])
    return [*counts, len(made)]
