"""A run starts from its first weights to the last bit, at every stage and precision, and asks for each of them once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from megahead.objectives.pretraining import build_parallel_model, initial_weights
from megahead.optim import build_optimizer
from support.on_ranks import on_ranks
from support.precisions import NEEDS_FP16
from support.small_engine import CPU
from support.small_run import small_config, stage


def started(world: Group, config: RunConfig) -> tuple[bool, set[int]]:
    """Whether the engine holds the run's first weights, and how often each was asked for."""
    mesh, first, asked = Mesh.build(world, config.parallel.tensor), initial_weights(config), Counter[str]()

    def weights(name: str) -> Tensor:
        asked[name] += 1
        return first.read(name)

    module = build_parallel_model(config, mesh.tensor_group, CPU)
    optimizer, content = build_optimizer(module, config.optimizer), deepspeed_config(config, mesh.data_group.size)
    engine = Engine(module, optimizer=optimizer, config=content, mesh=mesh, device=CPU, weights=FullTensors(weights))
    held = {key.removeprefix("weight/"): value for key, value in engine.tensors() if key.startswith("weight/")}
    return all(torch.equal(value, first.read(name)) for name, value in held.items()), set(asked.values())


@pytest.mark.parametrize(
    ("number", "precision"),
    [
        (0, "fp32"),
        (0, "bf16"),
        (1, "fp32"),
        (1, "bf16"),
        pytest.param(1, "fp16", marks=NEEDS_FP16),
        (2, "bf16"),
        (3, "fp32"),
        (3, "bf16"),
    ],
)
def test_first_weights_are_exact_and_drawn_once(tmp_path: Path, number: int, precision: str) -> None:
    changes = stage(number) | {"engine.precision": precision, "parallel.tensor": 2}
    for exact, asked in on_ranks(4, started, small_config(tmp_path, changes)):
        assert exact
        assert asked == {1}
