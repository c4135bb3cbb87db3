"""Runs whose score is no dot product: the same on every mesh, resumed bitwise, evaluated; exported without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel

from megahead.config import RunConfig
from megahead.convert import export, hf_folder
from megahead.distributed import Group, Launch
from megahead.errors import UserError
from megahead.evaluate.offline import evaluate_checkpoint
from megahead.report.metrics import read_metrics
from megahead.train import pretrain
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

SCORES: dict[str, dict[str, Any]] = {
    "cosine": {"objective": {"score": "cosine", "temperature": 0.1, "learned_temperature": True}},
    "harmonic": {"objective": {"score": "harmonic", "temperature": 0.2}, "optimizer.eps": 1e-4},
}


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize("score", SCORES)
def test_every_mesh_and_the_rows_take_the_same_course_and_a_resume_is_bitwise(tmp_path: Path, score: str) -> None:
    write_text(tmp_path)
    changes = SCORES[score] | {"training.steps": 6}
    on_ranks(1, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "alone")}))
    meshed = changes | stage(1) | {"parallel.tensor": 2, "engine.embedding": "rows"}
    on_ranks(4, run, small_config(tmp_path, meshed | {"output_dir": str(tmp_path / "four")}))
    on_ranks(1, run, small_config(tmp_path, changes), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    one, four = (read_metrics(tmp_path / name) for name in ("alone", "four"))
    assert [r["loss"] for r in four.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert four.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=1e-5)
    assert evaluate_checkpoint(tmp_path / "run", "pmi").loss == pytest.approx(one.validation[-1]["loss"], abs=1e-5)


def test_only_the_body_is_exported(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path, SCORES["cosine"] | {"training.steps": 2}))
    with pytest.raises(UserError, match=r"`--head pmi` needs .* but this one scores by `cosine`; use none"):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    assert AutoModel.from_pretrained(hf_folder(tmp_path / "run")).config.vocab_size == 60
