"""Multi-token prediction end to end: heads learn, a resume is bitwise, and exports have the body alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf.export import ensure_hf_folder, export
from megahead.objectives.auxiliary import held_out_row_collator
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return small_config(folder, {"objective": {"multi_token": {"heads": 2}, "group_samples": 4}} | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def test_heads_learn_tokens_further_ahead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    steps = {"training.steps": 60, "training.evaluate_every": 60, "optimizer.learning_rate": 1e-2}
    on_ranks(1, run, config_of(tmp_path, **steps))
    records = read_metrics(tmp_path / "run").training
    for name in ("next_loss", "ahead_loss_2", "ahead_loss_3"):
        losses = [record[name] for record in records]
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert records[-1]["next_loss"] < records[-1]["ahead_loss_2"] < records[-1]["ahead_loss_3"]  # less is known of them
    for record in records:
        assert record["loss"] == pytest.approx(record["next_loss"] + 0.3 * record["ahead_loss"])
    output = capfd.readouterr().out
    assert "tokens further ahead by 2 heads (weight 0.3)" in output
    assert f"next {records[-1]['next_loss']:.4f}  ahead {records[-1]['ahead_loss']:.4f}" in output


@pytest.mark.parametrize(
    "changes", [{"model.hidden_dropout": 0.1}, long({"engine.embedding": "rows", "optimizer.eps": 1e-4})], ids=str
)
def test_a_resume_is_bitwise(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    on_ranks(2, run, config_of(tmp_path, output_dir=str(tmp_path / "through"), **stage(1), **changes))
    again = config_of(tmp_path, **stage(1), **changes)
    on_ranks(2, run, again, str(tmp_path / "through/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "through")


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_exports_and_held_out_rows_have_nothing_of_it(tmp_path: Path, family: str) -> None:
    write_text(tmp_path)
    config = config_of(tmp_path, **{"model.family": family, "training.steps": 2, "training.evaluate_every": 2})
    on_ranks(1, run, config)
    assert held_out_row_collator(config).batch(np.full((8, 25), 5), range(8)).auxiliary == ()
    exported = AutoModelForCausalLM.from_pretrained(ensure_hf_folder(tmp_path / "run"))
    assert exported.config.num_hidden_layers == 2
    assert not [name for name in exported.state_dict() if "multi_token" in name or ".2." in name]
    export(tmp_path / "run", tmp_path / "out", "pmi")  # compares it with the model that was trained


@pytest.mark.parametrize(
    "changes",
    [
        {"engine.precision": "bf16", "engine.activation_checkpointing": True},
        long({"data.pack": "best_fit", "model.family": "llama"}),
        long({"objective.score": "cosine", "objective.temperature": 0.1, "objective.learned_temperature": True}),
        {"objective.negatives": 16, "objective.max_candidates": 40, "objective.vanilla_weight": 0.2},
        {"model.vocab_size": 61, "masked_inputs": {"mask_token": 60, "share": 0.3}},
    ],
    ids=str,
)
def test_it_goes_with_other_rows_scores_and_candidates(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    on_ranks(1, run, config_of(tmp_path, **({"training.steps": 12} | changes)))
    first, *_, last = read_metrics(tmp_path / "run").training
    assert last["ahead_loss"] < first["ahead_loss"]
