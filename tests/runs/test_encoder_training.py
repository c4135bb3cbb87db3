"""Encoders end to end: the loss falls, resuming is bitwise, meshes and ZeRO stages agree, exports load."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf.export import ensure_hf_folder
from megahead.report.read import read_metrics
from megahead.train.preflight import describe_run
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.plain_course import initial
from support.small_run import same_tensors, small_config, write_text

OBJECTIVES = {"headless": {}, "vanilla": {"name": "vanilla", "tied": True}}


def encoder_config(folder: Path, objective: dict[str, Any], changes: dict[str, Any] | None = None) -> RunConfig:
    model = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63}
    fixed = {
        "model": {**model, "vocab_multiple": 64, "max_positions": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62},
        "objective": objective,
        "batch.global_size": 4,
        "optimizer.eps": 1e-4,
    }
    return small_config(folder, fixed | (changes or {}))


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


MODERNBERT = {
    "model": {"family": "modernbert", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 63}
    | {"vocab_multiple": 64, "max_positions": 32, "local_window": 6, "intermediate_size": 64}
}
Alone = Callable[[str, str], Path]
"""The folder of a family's run on one rank, by the name of its objective."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    @cache
    def trained(family: str, objective: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        write_text(folder)
        on_ranks(1, run, encoder_config(folder, OBJECTIVES[objective], {"bert": {}, "modernbert": MODERNBERT}[family]))
        return folder / "run"

    return trained


@pytest.mark.parametrize(("objective", "pack"), [("headless", "stream"), ("vanilla", "best_fit")])
def test_it_learns_evaluates_and_exports(tmp_path: Path, objective: str, pack: str) -> None:
    write_text(tmp_path)
    longer = {"training.steps": 30, "training.evaluate_every": 5, "training.checkpoint_every": 30, "data.pack": pack}
    batch = {"batch.global_size": 16, "batch.micro_size": 16, "optimizer.learning_rate": 1e-2}
    longer["training.evaluate_samples"] = 200  # of three targets each
    config = encoder_config(tmp_path, OBJECTIVES[objective], longer | batch)
    assert on_ranks(1, run, config) == ["finished"]
    first, *_, last = read_metrics(tmp_path / "run").validation
    assert last["perplexity"] < first["perplexity"]
    assert last["bits_per_byte"] is None
    AutoModelForMaskedLM.from_pretrained(ensure_hf_folder(tmp_path / "run"))


ROBERTA = {"model.family": "roberta", "model.position_offset": 60, "masking.special_tokens": [59]}


@pytest.mark.parametrize(
    ("objective", "changes"),
    [("headless", {}), ("vanilla", {}), ("headless", {"masking.diffusion": True}), ("vanilla", ROBERTA)],
)
def test_resuming_is_bitwise(tmp_path: Path, objective: str, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    changes = {"model.hidden_dropout": 0.1, **changes}
    whole = encoder_config(tmp_path, OBJECTIVES[objective], {"output_dir": str(tmp_path / "whole"), **changes})
    on_ranks(1, run, whole)
    resumed = encoder_config(tmp_path, OBJECTIVES[objective], changes)
    on_ranks(1, run, resumed, str(tmp_path / "whole/checkpoints/step-00000003"))
    one, two = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "run")
    assert one.names() == two.names()
    assert all(one.read(name).equal(two.read(name)) for name in one.names())


@pytest.mark.parametrize(
    ("name", "number", "tensor", "data", "embedding"),
    [
        ("headless", 2, 2, 1, "dense"),
        long("headless", 3, 1, 2, "dense"),
        long("vanilla", 1, 1, 2, "dense"),
        long("vanilla", 3, 2, 2, "dense"),
        ("headless", 1, 1, 2, "rows"),
        long("headless", 3, 2, 2, "rows"),
    ],
)
def test_every_mesh_and_stage_takes_the_same_course(
    tmp_path: Path, alone: Alone, name: str, number: int, tensor: int, data: int, embedding: str
) -> None:
    write_text(tmp_path)
    objective = OBJECTIVES[name]
    zero = {"engine.deepspeed": {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}}}
    ways = {"engine.activation_checkpointing": True, "engine.embedding": embedding}
    meshed = encoder_config(tmp_path, objective, {"parallel.tensor": tensor, **zero, **ways})
    on_ranks(tensor * data, run, meshed)
    one, two = read_metrics(alone("bert", name)), read_metrics(tmp_path / "run")
    assert [r["loss"] for r in two.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert two.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "number", "tensor", "data", "ways"),
    [
        long("headless", 0, 2, 1, {"parallel.sequence": True}),
        long("headless", 2, 2, 2, {"engine.activation_checkpointing": "selective"}),
        long("headless", 2, 1, 2, {"engine.activation_checkpointing": "selective"}),
        long("headless", 3, 2, 2, {"parallel.sequence": True, "engine.activation_checkpointing": True}),
        long("vanilla", 1, 1, 2, {"engine.attention": "sdpa"}),
        long("vanilla", 3, 2, 1, {"parallel.sequence": True}),
        ("vanilla", 1, 2, 1, {"parallel.sequence": True}),
        ("headless", 1, 1, 2, {"engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_a_modernbert_takes_the_same_course_on_every_mesh_and_by_every_way(
    tmp_path: Path, alone: Alone, name: str, number: int, tensor: int, data: int, ways: dict[str, Any]
) -> None:
    write_text(tmp_path)
    zero = {"engine.deepspeed": {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}}}
    meshed = encoder_config(tmp_path, OBJECTIVES[name], MODERNBERT | {"parallel.tensor": tensor} | zero | ways)
    on_ranks(tensor * data, run, meshed)
    one, two = read_metrics(alone("modernbert", name)), read_metrics(tmp_path / "run")
    assert [r["loss"] for r in two.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert two.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=1e-5)
    before, after = (initial(meshed), open_checkpoint(alone("modernbert", name)))
    way = {key: after.read(key) - weight for key, weight in before.items()}
    for key in way:
        apart = open_checkpoint(tmp_path / "run").read(key) - after.read(key)
        assert float(apart.norm()) < 1e-3 * max(float(way[key].norm()), 1e-2), key


def test_a_modernbert_learns_and_resumes_bitwise(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"training.steps": 30, "training.evaluate_every": 5, "training.checkpoint_every": 15}
    changes |= {"batch.global_size": 16, "batch.micro_size": 16, "optimizer.learning_rate": 1e-2}
    changes |= MODERNBERT | {"training.evaluate_samples": 200}
    whole = encoder_config(tmp_path, {}, changes | {"output_dir": str(tmp_path / "whole")})
    on_ranks(1, run, whole)
    first, *_, last = read_metrics(tmp_path / "whole").validation
    assert last["perplexity"] < first["perplexity"]
    on_ranks(1, run, encoder_config(tmp_path, {}, changes), str(tmp_path / "whole/checkpoints/step-00000015"))
    assert same_tensors(tmp_path / "run", tmp_path / "whole")
    AutoModelForMaskedLM.from_pretrained(ensure_hf_folder(tmp_path / "run"))


def test_what_a_run_will_do_is_told_in_targets(tmp_path: Path) -> None:
    lines = dict(describe_run(RunPlan.of(encoder_config(tmp_path, {}))))
    assert lines["objective"] == "headless, candidates from 2 rows (6 targets), 15% of the tokens masked"
