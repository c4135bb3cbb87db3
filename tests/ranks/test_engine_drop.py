"""A step that is dropped leaves no trace, at every stage and precision; fp16's loss scale goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_engine import differing, small_batches, small_engine, whole

from megahead.distributed import Group

FP16 = pytest.param(
    "fp16",
    marks=pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="no fp16 arithmetic here"),
)


def one_dropped_step(group: Group, stage: int, precision: str) -> dict[str, Any]:
    """Good, dropped, good; beside an engine that takes the good steps only."""
    engine, bystander = (small_engine(group, stage, precision, accumulation=2) for _ in range(2))
    good, other = (small_batches([6, 4], 1 / 10, seed=seed + group.rank) for seed in (7, 70))
    for each in (engine, bystander):
        for _ in range(20 if precision == "fp16" else 1):  # until the loss scale fits
            for batch in good:
                each.micro_step(batch)
            each.step(0.01)
    before, scale = whole(engine), engine.loss_scale_state()
    for batch in other:
        engine.micro_step(batch)
    dropped = engine.drop()
    unchanged = differing(before, whole(engine)) == [] and engine.loss_scale_state() == scale
    for each in (engine, bystander):
        for batch in good:
            each.micro_step(batch)
        applied = each.step(0.01).applied
    same = differing(whole(engine), whole(bystander)) == []
    return {"dropped": not dropped.applied, "unchanged": unchanged, "applied": applied, "as if it never was": same}


@pytest.mark.parametrize("precision", ["fp32", "bf16", FP16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dropped_step_leaves_no_trace(stage: int, precision: str) -> None:
    if (stage, precision) == (0, "fp16"):
        pytest.skip("stage 0 has no fp16")
    for outcome in on_ranks(2, one_dropped_step, stage, precision, timeout=30):
        assert outcome == dict.fromkeys(outcome, True)


def scale_goes_on(group: Group) -> tuple[dict[str, float], float, list[float], list[float]]:
    first, second = (small_engine(group, 1, "fp16") for _ in range(2))
    (batch,) = small_batches([6], 1e-2, seed=1)

    def scales(engine: Any, steps: int) -> list[float]:
        told = []
        for _ in range(steps):
            engine.micro_step(batch._replace(scale=1e3))
            engine.step(0.01)
            told.append(engine.loss_scale)
        return told

    scales(first, 5)
    state = first.loss_scale_state()
    second.load(whole(first).__getitem__, first.optimizer_steps)
    second.set_loss_scale_state(state)
    return state, first.loss_scale, scales(first, 4), scales(second, 4)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="no fp16 arithmetic here")
def test_the_loss_scale_is_saved_and_goes_on() -> None:
    ((state, scale, first, second),) = on_ranks(1, scale_goes_on)
    assert state["cur_scale"] == scale < 2**16
    assert first == second
    assert first[-1] < scale
