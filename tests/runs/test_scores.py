"""Runs whose score is no dot product: the same on every mesh, resumed bitwise, evaluated; exported without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import ensure_hf_folder, export
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long_but
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

SCORES: dict[str, dict[str, Any]] = {
    "cosine": {"objective": {"score": "cosine", "temperature": 0.1, "learned_temperature": True}},
    "harmonic": {"objective": {"score": "harmonic", "temperature": 0.2}, "optimizer.eps": 1e-4},
    "corrected": {"objective": {"bias": "corrected"}},
}


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("score", "ranks"), long_but([("harmonic", 2)], [(score, ranks) for ranks in (2, 4) for score in SCORES])
)
def test_every_mesh_and_the_rows_take_the_same_course_and_a_resume_is_bitwise(
    tmp_path: Path, score: str, ranks: int
) -> None:
    write_text(tmp_path)
    changes = SCORES[score] | {"training.steps": 6}
    on_ranks(1, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "alone")}))
    meshed = changes | stage(1) | {"parallel.tensor": 2, "engine.embedding": "rows"}
    on_ranks(ranks, run, small_config(tmp_path, meshed | {"output_dir": str(tmp_path / "meshed")}))
    on_ranks(1, run, small_config(tmp_path, changes), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    one, other = (read_metrics(tmp_path / name) for name in ("alone", "meshed"))
    assert [r["loss"] for r in other.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert other.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=1e-5)
    head = "tied" if score == "corrected" else "pmi"
    assert evaluate_checkpoint(tmp_path / "run", head).loss == pytest.approx(one.validation[-1]["loss"], abs=1e-5)


def test_a_run_begins_to_learn_its_temperature_with_the_weights_of_one_that_did_not(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path, {"training.steps": 2, "output_dir": str(tmp_path / "source")}))
    begun = {"init": {"from_checkpoint": str(tmp_path / "source"), "mode": "continue"}, "training.steps": 1}
    begun |= {
        "schedule.warmup_steps": 0,
        "objective": {"learned_temperature": True, "temperature": 2.0},
        "optimizer.learning_rate": 1e-12,
    }
    on_ranks(1, run, small_config(tmp_path, begun))
    first, second = (open_checkpoint(tmp_path / name) for name in ("source", "run"))
    assert second.read("weight/temperature.log_value").exp().item() == pytest.approx(2.0)
    for name in (name for name in first.names() if name.startswith("weight/")):
        torch.testing.assert_close(second.read(name), first.read(name), rtol=0, atol=1e-9)


def test_only_the_body_is_exported(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path, SCORES["cosine"] | {"training.steps": 2}))
    with pytest.raises(UserError, match=r"`--head pmi` needs .* but this one scores by `cosine`; use none"):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    assert AutoModel.from_pretrained(ensure_hf_folder(tmp_path / "run")).config.vocab_size == 60
