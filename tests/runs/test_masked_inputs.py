"""A decoder with masked inputs end to end: it learns the same on two ranks, resumes bitwise, and is exported whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf.export import ensure_hf_folder
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, write_text

MASKED = {"model.vocab_size": 61, "masked_inputs": {"mask_token": 60, "share": 0.3}}


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def test_the_course_is_the_same_on_two_ranks_and_after_a_resume(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = MASKED | {"objective.group_samples": 4}
    whole = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "whole")})
    on_ranks(1, run, whole)
    on_ranks(2, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "two")}))
    on_ranks(1, run, small_config(tmp_path, changes), str(tmp_path / "whole/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "whole")
    one, two = (read_metrics(tmp_path / name) for name in ("whole", "two"))
    assert [r["loss"] for r in two.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert two.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=1e-5)
    on_ranks(1, run, small_config(tmp_path, {"output_dir": str(tmp_path / "plain"), "model.vocab_size": 61}))
    plain = read_metrics(tmp_path / "plain")
    assert plain.training[0]["loss"] != one.training[0]["loss"]
    assert AutoModelForCausalLM.from_pretrained(ensure_hf_folder(tmp_path / "run")).config.vocab_size == 61
