"""Replaced-token detection end to end: the model learns to find what its generator puts in, alike on any mesh; a resume
is bitwise, and the body goes out to be fine-tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel

from megahead.config.run import RunConfig
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import ensure_hf_folder, export
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long_but
from support.on_ranks import on_ranks
from support.small_run import VOCABULARY, same_tensors, small_config, stage, write_text

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}


def config_of(folder: Path, family: str = "modernbert", **changes: Any) -> RunConfig:
    fixed = {
        "model": MODEL | PLAIN | {"family": family},
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.3},
        "objective": {"replaced_tokens": {"generator_layers": 1}, "group_samples": 2},
        "optimizer.eps": 1e-4,
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def write_repetitions(folder: Path) -> None:
    """Documents of one token each, again and again: whatever is another one was replaced."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "text", vocab_size=VOCABULARY) as writer:
        for _ in range(400):
            writer.add_document([int(random.integers(1, VOCABULARY))] * int(random.integers(15, 60)) + [0])


def test_the_model_learns_to_find_what_the_generator_puts_in(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_repetitions(tmp_path)
    longer = {
        "training": {"steps": 60, "log_seconds": 0, "evaluate_every": 20, "evaluate_samples": 50},
        "batch": {"global_size": 16, "micro_size": 16},
        "optimizer": {"learning_rate": 1e-2},
        "objective": {"replaced_tokens": {"generator_layers": 1}},
    }
    on_ranks(1, run, config_of(tmp_path, **longer))
    metrics = read_metrics(tmp_path / "run")
    first, *_, last = metrics.validation
    assert first["detection"]["found"] < 0.3 < 0.6 < last["detection"]["found"]
    assert last["detection"]["loss"] < first["detection"]["loss"] * 0.75
    assert last["perplexity"] < first["perplexity"]
    trained = metrics.training[-1]
    assert trained["loss"] == pytest.approx(trained["generator_loss"] + 50 * trained["detection_loss"])
    assert trained["detection_found"] > 0.6
    said = capfd.readouterr().out
    assert "learned by a generator of 1 layer, whose tokens the model finds (weight 50)" in said
    assert f"detection {last['detection']['loss']:.4f}, found {last['detection']['found']:.1%}" in said


MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {"batch.micro_size": 8, "engine.activation_checkpointing": True}),
    (2, stage(1)),
    (2, {"parallel.tensor": 2, "parallel.sequence": True}),
    (4, stage(2)),
    (4, {"parallel.tensor": 2} | stage(3)),
]
REPLACED = {"generator_layers": 1}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "headless": {"group_samples": 2, "replaced_tokens": REPLACED},
    "headless, all ids": {"group_samples": 2, "bias": "once", "replaced_tokens": REPLACED | {"draws": "vocabulary"}},
    "vanilla": {"name": "vanilla", "tied": True, "replaced_tokens": REPLACED},
}


def courses(folder: Path, objective: str, meshes: list[tuple[int, dict[str, Any]]]) -> None:
    """What is drawn is the same on all meshes, too: one other token would show in the losses."""
    write_text(folder)
    kind = {"objective": OBJECTIVES[objective]}
    on_ranks(1, run, config_of(folder, output_dir=str(folder / "alone"), **kind))
    alone = read_metrics(folder / "alone")
    for place, (ranks, changes) in enumerate(meshes):
        there = folder / f"mesh-{place}"
        on_ranks(ranks, run, config_of(folder, output_dir=str(there), **kind, **changes))
        meshed = read_metrics(there)
        for name in ("loss", "gradient_norm", "detection_loss", "detection_found"):
            expected = [record[name] for record in alone.training]
            assert [record[name] for record in meshed.training] == pytest.approx(expected, rel=1e-4), (changes, name)
        assert meshed.validation[-1]["loss"] == pytest.approx(alone.validation[-1]["loss"], rel=1e-5)
        assert meshed.validation[-1]["detection"] == pytest.approx(alone.validation[-1]["detection"], rel=1e-4)


@pytest.mark.long
def test_every_mesh_and_stage_takes_the_course_of_one_rank(tmp_path: Path) -> None:
    courses(tmp_path, "headless", MESHES)


@pytest.mark.parametrize("generator", long_but(["headless"], OBJECTIVES))
def test_two_ranks_take_the_course_of_one(tmp_path: Path, generator: str) -> None:
    courses(tmp_path, generator, [(2, stage(3 if generator == "headless" else 1))])


@pytest.mark.long
@pytest.mark.parametrize("generator", OBJECTIVES)
def test_four_ranks_take_the_course_of_one(tmp_path: Path, generator: str) -> None:
    courses(tmp_path, generator, MESHES[-1:])


def test_a_resume_is_bitwise(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(2, run, config_of(tmp_path, output_dir=str(tmp_path / "through"), **stage(1)))
    on_ranks(2, run, config_of(tmp_path, **stage(1)), str(tmp_path / "through/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "through")
    through, resumed = (read_metrics(tmp_path / name) for name in ("through", "run"))
    assert resumed.validation[-1]["detection"] == through.validation[-1]["detection"]


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_body_alone_is_exported_and_the_generator_is_scored(tmp_path: Path, family: str) -> None:
    write_text(tmp_path)
    on_ranks(1, run, config_of(tmp_path, family, **{"training.steps": 2, "training.evaluate_every": 2}))
    with pytest.raises(
        UserError, match=r"`--head pmi` needs .* detects replaced tokens and predicts no tokens; use none"
    ):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    exported = AutoModel.from_pretrained(ensure_hf_folder(tmp_path / "run"))
    assert exported.config.num_hidden_layers == 2
    last = read_metrics(tmp_path / "run").validation[-1]
    card = (ensure_hf_folder(tmp_path / "run") / "README.md").read_text()
    assert f"{last['detection']['kept']:.1%} of others kept (step 2), its generator's perplexity" in card
    found = evaluate_checkpoint(tmp_path / "run", "pmi")
    assert found.loss == pytest.approx(last["loss"], abs=1e-5)
    assert found.auxiliary is not None
    assert found.auxiliary["loss"] == pytest.approx(last["detection"]["loss"], abs=1e-5)


def test_half_precision_compiled_blocks_and_muon_go_with_it(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, config_of(tmp_path))
    losses = [record["loss"] for record in read_metrics(tmp_path / "run").training]
    half = config_of(tmp_path, output_dir=str(tmp_path / "half"), **{"engine.precision": "bf16"} | stage(1))
    on_ranks(2, run, half)
    near = [record["loss"] for record in read_metrics(tmp_path / "half").training]
    assert near == pytest.approx(losses, rel=0.03)
    on_ranks(1, run, config_of(tmp_path, output_dir=str(tmp_path / "muon"), **{"optimizer.name": "muon"}))
    assert read_metrics(tmp_path / "muon").training[-1]["loss"] < losses[0]
