"""A checkpoint written by any number of ranks at any ZeRO stage exports to the model that those ranks hold.

16 cases in which every two settings of (stage, ranks, head, residual) meet. Each rank count writes as many files.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_checkpoint import small_config
from small_engine import CPU, small_optimizer
from torch import Tensor

from megahead.checkpoint import save_checkpoint
from megahead.config import RunConfig, deepspeed_config
from megahead.convert import export, load_causal
from megahead.distributed import Group, Mesh
from megahead.engine import Engine
from megahead.objectives import log_unigram
from megahead.pretraining import Pretraining, build

STAGES, RANKS = [0, 1, 2, 3], [1, 2, 3, 4]
HEADS = [("pmi", {}), ("tied", {}), ("trained", {"name": "vanilla"}), ("trained", {"name": "vanilla", "tied": True})]
CASES = [
    (stage, RANKS[r], HEADS[(s + r) % 4], (s // 2 + r) % 2 == 0) for s, stage in enumerate(STAGES) for r in range(4)
]
COUNTS = torch.arange(64) ** 2 + 1


def config_of(stage: int, parallel: bool, objective: dict[str, Any]) -> RunConfig:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return small_config(
        model={"parallel_residual": parallel, "vocab_size": 61},
        objective=objective,
        engine={"deepspeed": {"zero_optimization": zero}, "precision": "fp32"},
        batch={"global_size": 12, "micro_size": 1},
    )


def random_model(config: RunConfig) -> Pretraining:
    """The same on every rank; every norm and bias is off its neutral value."""
    pretraining, generator = build(config, CPU), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pretraining.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return pretraining


def save(group: Group, config: RunConfig, run: str) -> None:
    mesh = Mesh.build(group, 1)
    module = random_model(config)
    settings = deepspeed_config(config, mesh.data.size)
    engine = Engine(module, optimizer=small_optimizer(module), config=settings, mesh=mesh, device=CPU)
    tensors = [*engine.tensors(), ("state/target_counts", COUNTS)]
    state, plain = {"step": 1, "tokens": 9}, config.model_dump(mode="json")
    save_checkpoint(Path(run) / "checkpoints", 1, tensors, state=state, config=plain, group=group, keep=1)


@torch.no_grad()
def logits_of(config: RunConfig, head: str, ids_BT: Tensor) -> Tensor:
    """What the model in memory says, without any file."""
    model = random_model(config)
    matrix_VD = model.backbone.embedding.weight if model.head is None else model.head.weight
    logits_BTV = model.backbone(ids_BT) @ matrix_VD[:61].T
    return logits_BTV + log_unigram(COUNTS, 61) if head == "pmi" else logits_BTV


def test_the_cases_cover_every_pair_of_settings() -> None:
    tried = [tuple(map(str, case)) for case in CASES]
    for i, j in combinations(range(4), 2):
        assert len({(case[i], case[j]) for case in tried}) == len({c[i] for c in tried}) * len({c[j] for c in tried})


@pytest.mark.parametrize(("stage", "ranks", "head", "parallel"), CASES)
def test_logits(tmp_path: Path, stage: int, ranks: int, head: tuple[str, dict[str, Any]], parallel: bool) -> None:
    name, objective = head
    config = config_of(stage, parallel, objective)
    on_ranks(ranks, save, config, str(tmp_path / "run"))
    folder = export(tmp_path / "run", tmp_path / "out", name).folder
    ids_BT = torch.arange(60).view(2, 30)
    expected = logits_of(config, name, ids_BT)
    with torch.no_grad():
        logits = load_causal(folder)(ids_BT).logits
    assert float((logits - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()) / 10)
