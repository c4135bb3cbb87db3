"""State read from one engine and loaded into a fresh one continues bitwise, at every stage and between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from support.on_ranks import on_ranks
from support.small_engine import SmallModel, differing, small_batches, small_engine, whole

STAGES = [0, 1, 2, 3]


def train(engine: Engine, group: Group, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; other batches on every rank and step."""
    log = []
    for step in steps:
        (batch,) = small_batches([9], scale=1 / 9, seed=100 * step + group.rank)
        loss = engine.micro_step(batch)
        log.append((float(loss), engine.step(0.01 / (step + 1)).grad_norm))
    return log


def started(group: Group, stage: int, precision: str) -> list[str]:
    tensors = whole(small_engine(group, stage, precision))
    given = {f"weight/{name}": parameter.detach() for name, parameter in SmallModel().named_parameters()}
    return differing(given, {name: value for name, value in tensors.items() if name.startswith("weight/")})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_start_as_given_in_full_precision(stage: int, precision: str) -> None:
    assert on_ranks(2, started, stage, precision) == [[], []]


CAME_BACK = {"loaded": [], "same_log": True, "later": [], "steps": [3, 6, 6]}


def resumed(group: Group, stage: int, precision: str, chosen: dict[str, Any]) -> dict[str, Any]:
    first = small_engine(group, stage, precision, **chosen)
    train(first, group, range(3))
    saved, steps = whole(first), first.optimizer_steps
    log = train(first, group, range(3, 6))
    second = small_engine(group, stage, precision, **chosen)
    second.load(FullTensors(saved.__getitem__), steps)
    loaded = differing(saved, whole(second))
    same_log = train(second, group, range(3, 6)) == log
    steps = [steps, first.optimizer_steps, second.optimizer_steps]
    return {"loaded": loaded, "same_log": same_log, "later": differing(whole(first), whole(second)), "steps": steps}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(stage: int, precision: str) -> None:
    for outcome in on_ranks(2, resumed, stage, precision, {}):
        assert outcome == CAME_BACK


OTHERWISE: dict[str, dict[str, Any]] = {
    "in turn": {"zero": {"round_robin_gradients": True}},
    "offloaded": {"offload": True},
    "offloaded in turn": {"offload": True, "zero": {"round_robin_gradients": True}},
    "whole": {"persistence_threshold": 10**5},
}


@pytest.mark.parametrize(
    ("stage", "way"),
    [(stage, way) for stage in (1, 2) for way in ("in turn", "offloaded", "offloaded in turn")]
    + [(3, "offloaded"), (3, "whole")],
)
def test_however_parameters_are_laid_out_they_come_back(stage: int, way: str) -> None:
    for outcome in on_ranks(2, resumed, stage, "bf16", OTHERWISE[way]):
        assert outcome == CAME_BACK


def hand_on(group: Group, stage: int, given: dict[str, Tensor] | None, steps: int) -> tuple[dict[str, Tensor], ...]:
    """Loads what another mesh left, trains two steps; the tensors right after loading, and at the end."""
    engine = small_engine(group, stage)
    if given is not None:
        engine.load(FullTensors(given.__getitem__), steps)
    loaded = whole(engine)
    train(engine, group, range(steps, steps + 2))
    return loaded, whole(engine)


def test_any_stage_and_number_of_ranks_loads_what_any_other_left() -> None:
    left = None
    for number, (ranks, stage) in enumerate([(2, 0), (1, 1), (2, 3), (1, 0), (2, 2), (1, 3), (2, 1)]):
        results = on_ranks(ranks, hand_on, stage, left, 2 * number)
        for loaded, _ in results:
            assert left is None or differing(left, loaded) == []
        assert len(results[0][1]) == 7 * 3
        assert all(differing(results[0][1], other) == [] for _, other in results)
        left = results[0][1]


def probe() -> SmallModel:
    """An untied head over a frozen body."""
    model = SmallModel(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "head.weight")
    return model


def probed(group: Group, stage: int, precision: str) -> dict[str, Any]:
    engine = small_engine(group, stage, precision, module=probe())
    start = whole(engine)
    given = {f"weight/{name}": parameter for name, parameter in probe().state_dict().items()}
    train(engine, group, range(2))
    saved = whole(engine)
    fresh = probe()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    second = small_engine(group, stage, precision, module=fresh)
    second.load(FullTensors(saved.__getitem__), engine.optimizer_steps)
    loaded = differing(saved, whole(second))
    same_log = train(engine, group, range(2, 4)) == train(second, group, range(2, 4))
    begun = differing(given, {name: start[name] for name in given})
    return {"begun": begun, "moved": sorted(differing(start, saved)), "loaded": loaded, "same_log": same_log}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_body_is_kept_as_it_came(stage: int, precision: str) -> None:
    trained = ["exp_avg/head.weight", "exp_avg_sq/head.weight", "weight/head.weight"]
    for outcome in on_ranks(2, probed, stage, precision):
        assert outcome == {"begun": [], "moved": trained, "loaded": [], "same_log": True}
