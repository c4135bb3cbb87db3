"""A checkpoint written on any mesh, of any shape, exports with any head to the model that the ranks hold.

Cases in which every two settings of (head, stage, size, rotary share, stored dtype, residual, activation, tensor ranks)
meet; always two data ranks, so that ZeRO has something to split.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from megahead.hf.export import export
from megahead.hf.loading import load_backbone, load_causal, load_masked
from megahead.losses.candidates import log_unigram
from megahead.objectives.pretraining import Pretraining, build_parallel_model
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.saved import save_checkpoint
from support.small_checkpoint import small_config
from support.small_engine import CPU, small_optimizer

HEADS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("pmi", {}),
    ("pmi", {"temperature": 0.7}),
    ("tied", {}),
    ("trained", {"name": "vanilla", "temperature": 0.5}),
    ("tied", {"name": "vanilla", "tied": True}),
]
SIZES = [(1, 32, 2), (2, 64, 4), (3, 64, 8)]  # layers, width, heads
FACTORS: list[list[Any]] = [
    HEADS,
    [0, 1, 2, 3],
    SIZES,
    [0.25, 0.5, 1.0],
    ["float32", "bfloat16", "float16"],
    [True, False],
    ["gelu", "gelu_tanh"],
    [1, 2],
]
COUNTS = torch.arange(64) ** 2 + 1
ROUNDING = {"bfloat16": 0.05, "float16": 0.01}  # of the largest output, over all layers


def pairwise(factors: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Few cases in which every two values of different factors meet: each new one takes what meets most for the first
    time. The same cases every time."""
    levels = [range(len(values)) for values in factors]
    apart = {((i, a), (j, b)) for i, j in combinations(range(len(factors)), 2) for a in levels[i] for b in levels[j]}
    cases = []
    while apart:
        case = dict(min(apart))
        for k in range(len(factors)):
            if k not in case:
                met = [sum(tuple(sorted([(k, v), other])) in apart for other in case.items()) for v in levels[k]]
                case[k] = met.index(max(met))
        apart -= set(combinations(sorted(case.items()), 2))
        cases.append(tuple(factors[k][case[k]] for k in range(len(factors))))
    return cases


CASES = pairwise(FACTORS)


def config_of(case: tuple[Any, ...]) -> RunConfig:
    (_, objective), stage, (layers, width, heads), rotary_pct, _, parallel, activation, tensor = case
    shape = {"num_layers": layers, "hidden_size": width, "num_heads": heads, "vocab_size": 61, "rotary_base": 700.0}
    bricks = {"rotary_pct": rotary_pct, "parallel_residual": parallel, "activation": activation, "norm_eps": 1e-4}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return small_config(
        model={**shape, **bricks, "intermediate_size": 100},
        objective=objective,
        engine={"deepspeed": {"zero_optimization": zero}, "precision": "fp32"},
        parallel={"tensor": tensor},
        batch={"global_size": 12, "micro_size": 1},
    )


def random_model(config: RunConfig) -> Pretraining:
    """The whole model; every norm and bias is off its neutral value."""
    pretraining, generator = initialized(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pretraining.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return pretraining


def save(group: Group, config: RunConfig, run: str) -> None:
    mesh = Mesh.build(group, config.parallel.tensor)
    weights = dict(random_model(config).named_parameters())
    module = build_parallel_model(config, mesh.tensor_group, CPU)
    settings = deepspeed_config(config, mesh.data_group.size)
    engine = Engine(
        module,
        optimizer=small_optimizer(module),
        config=settings,
        mesh=mesh,
        device=CPU,
        weights=FullTensors(lambda name: weights[name].detach()),
    )
    tensors = [*engine.tensors(), ("state/target_counts", COUNTS)]
    state, plain = {"step": 1, "tokens": 9}, config.model_dump(mode="json")
    save_checkpoint(Path(run) / "checkpoints", 1, tensors, state=state, config=plain, group=group)


@torch.no_grad()
def expected(config: RunConfig, head: str, ids_BT: Tensor) -> Tensor:
    """What the model in memory says, without any file."""
    model = random_model(config)
    hidden_BTD: Tensor = model.backbone(ids_BT)
    if head == "none":
        return hidden_BTD
    matrix_VD = model.backbone.embedding.weight if model.head is None else model.head.weight
    logits_BTV = hidden_BTD @ matrix_VD[:61].T / config.objective.temperature
    return logits_BTV + log_unigram(COUNTS, 61) if head == "pmi" else logits_BTV


@torch.no_grad()
def exported(folder: Path, head: str, ids_BT: Tensor) -> Tensor:
    if head == "none":
        hidden_BTD: Tensor = load_backbone(folder)(ids_BT).last_hidden_state
        return hidden_BTD
    logits_BTV: Tensor = load_causal(folder)(ids_BT).logits
    return logits_BTV


def test_the_cases_are_few_and_cover_every_pair_of_settings() -> None:
    assert len(CASES) <= 40
    for i, j in combinations(range(len(FACTORS)), 2):
        met = {(str(case[i]), str(case[j])) for case in CASES}
        assert len(met) == len(FACTORS[i]) * len(FACTORS[j]), (i, j)


@pytest.mark.parametrize("case", [case if case in CASES[::3] else long(case) for case in CASES], ids=str)
def test_outputs(tmp_path: Path, case: tuple[Any, ...]) -> None:
    head, dtype = case[0][0], case[4]
    config = config_of(case)
    on_ranks(2 * config.parallel.tensor, save, config, str(tmp_path / "run"))
    folder = export(tmp_path / "run", tmp_path / "out", head, dtype=dtype).folder
    ids_BT = torch.arange(60).view(2, 30)
    right = expected(config, head, ids_BT)
    scale, error = float(right.abs().max()), float((exported(folder, head, ids_BT) - right).abs().max())
    assert 1 < scale < 60
    assert error < (1e-4 if dtype == "float32" else ROUNDING[dtype] * scale)


LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_heads": 1},
    "qwen2": {"num_key_heads": 2, "attention_bias": "qkv"},
    "qwen3": {"num_key_heads": 1, "head_dim": 12, "qk_norm": True},
}


@pytest.mark.parametrize(
    ("kind", "head", "objective", "stage", "dtype"),
    [
        ("llama", "pmi", {"temperature": 0.7}, 3, "float32"),
        long("qwen2", "pmi", {}, 1, "bfloat16"),
        long("qwen3", "trained", {"name": "vanilla", "temperature": 0.5}, 2, "float32"),
        ("qwen3", "none", {}, 0, "float16"),
    ],
    ids=str,
)
def test_a_llama_from_four_ranks(tmp_path: Path, kind: str, head: Any, objective: Any, stage: int, dtype: str) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = small_config(
        model={"family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "norm_eps": 1e-4, **LLAMAS[kind]},
        objective=objective,
        engine={"deepspeed": {"zero_optimization": zero}, "precision": "fp32"},
        parallel={"tensor": 2, "sequence": stage == 3},
        batch={"global_size": 12, "micro_size": 1},
    )
    on_ranks(4, save, config, str(tmp_path / "run"))
    folder = export(tmp_path / "run", tmp_path / "out", head, dtype=dtype).folder
    ids_BT = torch.arange(60).view(2, 30)
    right = expected(config, head, ids_BT)
    scale, error = float(right.abs().max()), float((exported(folder, head, ids_BT) - right).abs().max())
    assert 1 < scale < 60
    assert error < (1e-4 if dtype == "float32" else ROUNDING[dtype] * scale)


@pytest.mark.parametrize(
    ("head", "objective", "stage", "dtype"),
    [
        ("pmi", {"temperature": 0.7}, 3, "float32"),
        ("trained", {"name": "vanilla", "tied": True}, 2, "float32"),
        long("none", {}, 1, "bfloat16"),
    ],
    ids=str,
)
def test_a_modernbert_from_four_ranks(tmp_path: Path, head: Any, objective: Any, stage: int, dtype: str) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    shape = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "local_window": 8}
    config = small_config(
        model={"family": "modernbert", **shape},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2},
        objective=objective,
        engine={"deepspeed": {"zero_optimization": zero}, "precision": "fp32"},
        parallel={"tensor": 2, "sequence": stage == 3},
        batch={"global_size": 12, "micro_size": 1},
    )
    on_ranks(4, save, config, str(tmp_path / "run"))
    folder = export(tmp_path / "run", tmp_path / "out", head, dtype=dtype).folder
    ids_BT, model = torch.arange(60).view(2, 30), random_model(config)
    with torch.no_grad():
        if head == "trained":
            hidden = model.mask_head(model.backbone(ids_BT))
            right = hidden @ model.backbone.embedding.weight[:61].T + model.mask_head.bias[:61]
        else:
            right = expected(config, head, ids_BT)
        found = (
            load_backbone(folder)(ids_BT).last_hidden_state if head == "none" else load_masked(folder)(ids_BT).logits
        )
    scale, error = float(right.abs().max()), float((found - right).abs().max())
    assert 1 < scale < 60
    assert error < (2e-4 if dtype == "float32" else ROUNDING[dtype] * scale)
