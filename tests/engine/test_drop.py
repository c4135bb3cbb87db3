"""A step that is dropped, or whose gradients are not finite, leaves no trace: at every stage, precision and offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from support.long import long_but
from support.on_ranks import on_ranks
from support.precisions import NEEDS_FP16, PRECISIONS
from support.small_engine import SmallBatch, differing, small_batches, small_engine, whole

SMALL_SCALE = {"fp16": {"initial_scale_power": 8}}
"""Fits the first step already."""


def settings(stage: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Precision and the rest of what may be chosen at `stage`."""
    for precision in PRECISIONS[: 2 if stage == 0 else 3]:
        yield precision, {}
        if stage in (1, 2):
            yield precision, {"zero": {"round_robin_gradients": True}}
        if stage > 0:
            yield precision, {"offload": True}
        if stage in (1, 2):
            yield precision, {"offload": True, "zero": {"round_robin_gradients": True}}


class Course:
    """An engine, and everything about it that a step could change."""

    def __init__(self, group: Group, stage: int, precision: str, chosen: dict[str, Any]) -> None:
        self.engine = small_engine(group, stage, precision, accumulation=2, deepspeed=SMALL_SCALE, **chosen)

    def gather(self, batches: list[SmallBatch]) -> Engine:
        for batch in batches:
            self.engine.micro_step(batch)
        return self.engine

    def traces(self) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
        return whole(self.engine), self.engine.loss_scale.state(), self.engine.optimizer_steps

    def unchanged(self, before: tuple[dict[str, torch.Tensor], dict[str, float], int]) -> bool:
        tensors, scale, steps = self.traces()
        return differing(before[0], tensors) == [] and (scale, steps) == before[1:]


def tried_and_undone(course: Course, attempt: str, batches: list[SmallBatch]) -> bool:
    """Whether nothing changed but how fp16's search for a loss scale goes on, which is set back."""
    before = course.traces()
    engine = course.gather(batches)
    result = engine.skip_step() if attempt == "drop" else engine.step(0.01)
    if attempt == "step":
        engine.loss_scale.restore(before[1])
    return not result.applied and course.unchanged(before)


def without_a_trace(group: Group, stage: int) -> dict[str, Any]:
    """Good, one that must leave no trace, good, and so on, beside a course of the good steps only."""
    good, spike = (small_batches([6, 4], 1 / 10, seed=seed + group.rank) for seed in (7, 70))
    spike = [batch._replace(scale=5.0) for batch in spike]
    nan = [batch._replace(scale=float("nan")) for batch in good[:1]] if group.rank == group.size - 1 else good[:1]
    wrong: dict[str, Any] = {}
    for precision, chosen in settings(stage):
        course, bystander = (Course(group, stage, precision, chosen) for _ in range(2))
        outcomes = [each.gather(good).step(0.01).applied for each in (course, bystander)]
        for attempt, first in (("drop", spike[:1]), ("drop", nan), ("step", nan)):
            outcomes += [tried_and_undone(course, attempt, first + good[1:])]
            outcomes += [each.gather(good).step(0.01).applied for each in (course, bystander)]
            outcomes += [course.unchanged(bystander.traces())]
        if not all(outcomes):
            wrong[f"{precision} {chosen}"] = outcomes
    return wrong


@pytest.mark.parametrize(
    ("stage", "ranks"),
    long_but([(0, 2), (1, 1), (3, 2)], [(s, ranks) for s in (0, 1, 2, 3) for ranks in (1, 2)]),
)
def test_what_is_not_applied_leaves_no_trace(stage: int, ranks: int) -> None:
    assert on_ranks(ranks, without_a_trace, stage) == [{}] * ranks


def scale_goes_on(group: Group) -> tuple[dict[str, float], float, list[float], list[float]]:
    first, second = (small_engine(group, 1, "fp16") for _ in range(2))
    (batch,) = small_batches([6], 1e-2, seed=1)

    def scales(engine: Any, steps: int) -> list[float]:
        told = []
        for _ in range(steps):
            engine.micro_step(batch._replace(scale=1e3))
            engine.step(0.01)
            told.append(engine.loss_scale.value)
        return told

    scales(first, 5)
    state = first.loss_scale.state()
    second.load(FullTensors(whole(first).__getitem__), first.optimizer_steps)
    second.loss_scale.restore(state)
    return state, first.loss_scale.value, scales(first, 4), scales(second, 4)


@NEEDS_FP16
def test_the_loss_scale_is_saved_and_goes_on() -> None:
    ((state, scale, first, second),) = on_ranks(1, scale_goes_on)
    assert state["cur_scale"] == scale < 2**16
    assert first == second
    assert first[-1] < scale


def overflows_at_the_smallest_scale(group: Group) -> list[tuple[bool, float]]:
    engine, outcomes = small_engine(group, 1, "fp16"), []
    engine.loss_scale.restore({**engine.loss_scale.state(), "cur_scale": 1.0})
    (batch,) = small_batches([6], 1e-2, seed=1)
    for _ in range(3):
        engine.micro_step(batch._replace(scale=float("nan")))
        outcomes.append((engine.step(0.01).applied, engine.loss_scale.value))
    return outcomes


@NEEDS_FP16
def test_what_overflows_at_the_smallest_scale_is_not_applied_and_that_is_all() -> None:
    """What to do then is the fault policy's decision."""
    assert on_ranks(1, overflows_at_the_smallest_scale) == [[(False, 1.0)] * 3]
