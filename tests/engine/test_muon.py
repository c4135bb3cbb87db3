"""Under every ZeRO stage Muon options whole matrices, as torch's own in one process, and goes on bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_resume import CAME_BACK, resumed
from torch import Tensor, nn

from megahead.config.training import OptimizerConfig
from megahead.distributed.group import Group
from megahead.optim import GroupOptions, Muon
from support.long import long
from support.on_ranks import on_ranks
from support.small_engine import WIDTH, SmallModel, small_batches, small_engine, whole

CONFIG = OptimizerConfig(name="muon", learning_rate=1.0, weight_decay=0.1, eps=1e-4)
STEPS = 3


def small_model() -> SmallModel:
    """With a third matrix, of another size, so that two ranks cut one of them."""
    model = SmallModel()
    model.dropout = nn.Linear(WIDTH, WIDTH)
    return model


def by_kind(module: nn.Module) -> tuple[list[nn.Parameter], ...]:
    """Matrices, the table, vectors."""
    named = dict(module.named_parameters())
    table = named.pop("embedding.weight")
    return [p for p in named.values() if p.ndim > 1], [table], [p for p in named.values() if p.ndim < 2]


def muon(module: nn.Module) -> torch.optim.Optimizer:
    options = [GroupOptions(0.1, is_muon=True), GroupOptions(0.1), GroupOptions(0.0)]
    groups = [{"params": found, **move._asdict()} for found, move in zip(by_kind(module), options, strict=True)]
    return Muon(groups, CONFIG, fused=True)


def rate_of(step: int) -> float:
    return 0.02 / (step + 1)


def trained(group: Group, stage: int, chosen: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after steps in which all ranks read the same, so that gradients are to the bit those of one."""
    engine = small_engine(group, stage, module=small_model(), optimizer=muon, clipping=0.0, **chosen)
    for step in range(STEPS):
        engine.micro_step(*small_batches([9], scale=1 / 9, seed=step))
        assert engine.step(rate_of(step)).applied
    return {name: tensor for name, tensor in whole(engine).items() if name.startswith("weight/")}


def expected() -> dict[str, Tensor]:
    """By torch's own optimizers, without an engine."""
    module = small_model()
    matrices, table, vectors = by_kind(module)
    settings = {"betas": CONFIG.betas, "eps": CONFIG.eps}
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(table, weight_decay=0.1, **settings),
        torch.optim.AdamW(vectors, weight_decay=0.0, **settings),
    ]
    for step in range(STEPS):
        module.zero_grad()
        module(*small_batches([9], scale=1 / 9, seed=step)).backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate_of(step)
            optimizer.step()
    return {f"weight/{name}": parameter.detach() for name, parameter in module.named_parameters()}


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in turn": {"zero": {"round_robin_gradients": True}},
    "offloaded": {"offload": True},
    "in small groups": {"zero": {"sub_group_size": 100}},
}
MATRIX = [(ranks, stage, "as it is") for ranks in (1, 2, 4) for stage in (0, 1, 2, 3)]
MATRIX += [(2, 1, "in turn"), (4, 2, "in turn"), (2, 2, "offloaded"), (2, 3, "offloaded"), (2, 3, "in small groups")]


@pytest.mark.parametrize(("ranks", "stage", "way"), [long(*case) if case[0] == 4 else case for case in MATRIX])
def test_updates_are_those_of_torchs_muon_in_one_process(ranks: int, stage: int, way: str) -> None:
    reference = expected()
    for weights in on_ranks(ranks, trained, stage, WAYS[way]):
        assert weights.keys() == reference.keys()
        for name, weight in reference.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(stage: int, precision: str) -> None:
    for outcome in on_ranks(2, resumed, stage, precision, {"optimizer": muon}):
        assert outcome == CAME_BACK
