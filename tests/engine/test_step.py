"""The engine's step equals plain torch at every stage, and a bad step changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megahead.distributed.group import Group
from megahead.engine.engine import StepResult
from support.long import long
from support.on_ranks import on_ranks
from support.precisions import NEEDS_FP16, PRECISIONS
from support.small_engine import SmallBatch, SmallModel, differing, small_batches, small_engine, small_optimizer, whole

STAGES = [0, 1, 2, 3]
CLIPPING = 0.05
COUNTS = [8, 1, 5, 0]
"""Targets of the four micro-batches of a step: ragged on purpose."""


def micro_batches(step: int, data_ranks: int, accumulation: int) -> list[SmallBatch]:
    return small_batches(COUNTS, data_ranks * accumulation / sum(COUNTS), seed=step)


def plain_torch(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """One process, one batch a step: weights and gradient norms of the reference."""
    module = SmallModel()
    optimizer = small_optimizer(module)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in micro_batches(step, 1, 1):
            module(batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
    return {f"weight/{name}": p.detach() for name, p in module.named_parameters()}, norms


def engine_steps(group: Group, stage: int, steps: int, chosen: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    accumulation = len(COUNTS) // group.size
    engine = small_engine(group, stage, accumulation=accumulation, clipping=CLIPPING, **chosen)
    norms = []
    for step in range(steps):
        for batch in micro_batches(step, group.size, accumulation)[group.rank :: group.size]:
            engine.micro_step(batch)
        norms.append(engine.step(0.01 * (step + 1)).grad_norm)
    return whole(engine), norms


def assert_equal_to_plain_torch(ranks: int, stage: int, chosen: dict[str, Any]) -> None:
    weights, norms = plain_torch(5)
    assert min(norms) > CLIPPING
    for engine_tensors, engine_norms in on_ranks(ranks, engine_steps, stage, 5, chosen):
        assert engine_norms == pytest.approx(norms, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(engine_tensors[name], weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, long(4)])
@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_plain_torch_with_ragged_targets_and_active_clipping(stage: int, ranks: int) -> None:
    assert_equal_to_plain_torch(ranks, stage, {})


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2])
def test_slices_laid_out_in_turn_are_read_where_they_lie(stage: int, offload: bool) -> None:
    assert_equal_to_plain_torch(2, stage, {"offload": offload, "zero": {"round_robin_gradients": True}})


class Weighed(nn.Module):
    """A loss whose gradient is the batch itself, for each of 64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * batch.to(self.weight.dtype)).float().sum()


def one_large_and_many_small(group: Group, stage: int, precision: str, count: int) -> float:
    engine = small_engine(group, stage, precision, accumulation=count, clipping=1e9, module=Weighed())
    for share in [0.25, *[0.25 / 4096] * (count - 1)]:
        engine.micro_step(torch.full((8, 8), share * count))
    return engine.step(0.01).grad_norm


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_too_small_for_half_precision_add_up(stage: int, precision: str) -> None:
    """1 + 1/4096 is 1 in both formats; 63 times that much is 1.5 %, of which sending it rounds off 0.4 at most."""
    for norm in on_ranks(2, one_large_and_many_small, stage, precision, 64):
        assert norm == pytest.approx(8 * 0.25 * (1 + 63 / 4096), rel=4e-3)


def one_bad_step(group: Group, stage: int, precision: str) -> dict[str, Any]:
    """A good step, one that is nan on the last rank only, and the good step again after it."""
    engine = small_engine(group, stage, precision, accumulation=2)
    bystander = small_engine(group, stage, precision, accumulation=2)
    batches = small_batches([6, 4], 1 / 10, seed=7 + group.rank)
    nan = batches[0]._replace(scale=float("nan") if group.rank == group.size - 1 else 1.0)
    outcomes = []
    for first in (batches[0], nan, batches[0]):
        before = whole(engine)
        engine.micro_step(first)
        engine.micro_step(batches[1])
        outcomes.append((engine.step(0.01).applied, bool(differing(before, whole(engine)))))
    for _ in range(2):
        for batch in batches:
            bystander.micro_step(batch)
        bystander.step(0.01)
    steps = engine.optimizer_steps
    return {"outcomes": outcomes, "as if it never was": differing(whole(engine), whole(bystander)), "steps": steps}


@pytest.mark.parametrize("precision", ["fp32", long("bf16")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_nan_on_one_rank_changes_nothing_on_any(stage: int, precision: str) -> None:
    for outcome in on_ranks(2, one_bad_step, stage, precision):
        assert outcome["outcomes"] == [(True, True), (False, False), (True, True)]
        assert outcome["as if it never was"] == []
        assert outcome["steps"] == 2


def overflowing(group: Group, stage: int) -> tuple[bool, bool, bool]:
    engine = small_engine(group, stage, "fp16")
    (batch,) = small_batches([6], 1e6, seed=1)
    before = whole(engine)
    engine.micro_step(batch)
    result = engine.step(0.01)
    unchanged = differing(before, whole(engine)) == []
    for _ in range(20):  # the loss scale halves until the gradients fit
        engine.micro_step(batch._replace(scale=1e-2))
        later = engine.step(0.01)
    return result.applied, unchanged, later.applied


@NEEDS_FP16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_in_fp16_is_told_and_changes_nothing(stage: int) -> None:
    assert on_ranks(1, overflowing, stage) == [(False, True, True)]


def gradient_of_one_rank(group: Group, immediate: bool) -> float:
    """The norm of a step in which the last rank alone has a gradient for one parameter."""
    sums = {"bf16": {"immediate_grad_update": immediate}}
    engine = small_engine(group, 1, "bf16", module=SmallModel(tied=False), deepspeed=sums)
    if group.rank != group.size - 1:
        engine.module.head.weight.requires_grad_(False)
    engine.micro_step(*small_batches([7], 1 / 7, seed=group.rank))
    return engine.step(0.01).grad_norm


def test_ranks_agree_on_the_norm_where_one_alone_has_a_gradient() -> None:
    """Also where DeepSpeed sums gradients during the backward pass."""
    norms = [norm for immediate in (False, True) for norm in on_ranks(2, gradient_of_one_rank, immediate)]
    assert len(set(norms)) == 1


def evaluated(group: Group, stage: int, tied: bool) -> tuple[float, bool, bool]:
    """Loss of an evaluation after two training steps, next to the same weights in a plain module."""
    engine = small_engine(group, stage, module=SmallModel(tied))
    (batch,) = small_batches([6], 1 / 6, seed=group.rank)
    for _ in range(2):
        engine.micro_step(batch)
        engine.step(0.01)
    losses = engine.evaluate(batch, reduction="none")
    plain = SmallModel(tied).eval()
    weights = {name.removeprefix("weight/"): value for name, value in engine.tensors() if name.startswith("weight/")}
    plain.load_state_dict(weights)
    engine.micro_step(batch)
    engine.step(0.01)
    distance = float((losses - plain(batch, reduction="none")).abs().max())
    return distance, losses.requires_grad, engine.module.training


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_sees_the_trained_weights_also_those_used_outside_of_their_layer(stage: int, tied: bool) -> None:
    for distance, differentiable, training in on_ranks(2, evaluated, stage, tied):
        assert distance < 1e-6
        assert not differentiable
        assert training


class Watched(SmallModel):
    """Notes the mode of every forward pass, and fails when told so."""

    fails = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.modes = [*getattr(self, "modes", []), self.training]
        if self.fails:
            raise ValueError("told so")
        return super().forward(*args, **kwargs)


def modes_of_passes(group: Group) -> list[bool]:
    module = Watched(False)
    engine, (batch,) = small_engine(group, 1, module=module), small_batches([6], 1 / 6, seed=0)
    engine.evaluate(batch)
    module.fails = True
    with pytest.raises(ValueError, match="told so"):
        engine.evaluate(batch)
    module.fails = False
    engine.micro_step(batch)
    return module.modes


def test_only_evaluation_is_in_evaluation_mode_also_after_it_failed() -> None:
    assert on_ranks(1, modes_of_passes) == [[False, False, True]]


def steps_too_early(group: Group) -> list[str]:
    """Amid an accumulation, and a second time after one."""
    engine, told = small_engine(group, 0, accumulation=2), []
    for end in (engine.step, lambda _: engine.skip_step()):
        for k in range(2):
            engine.micro_step(small_batches([3], 1.0, seed=0)[0])
            told += refused(end) if k == 0 else []
        end(0.01)
        told += refused(end)
    return told


def refused(end: Callable[[float], StepResult]) -> list[str]:
    with pytest.raises(RuntimeError) as error:
        end(0.01)
    return [str(error.value)]


def test_a_step_amid_accumulation_is_refused() -> None:
    (told,) = on_ranks(1, steps_too_early)
    assert ["last micro-step" in each for each in told] == [True] * 4
