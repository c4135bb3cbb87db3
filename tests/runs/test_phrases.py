"""Encoders that find masked phrases in other rows: the same on every mesh, resumed bitwise, exported as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf.export import export
from megahead.losses.candidates import evaluation_target_counts
from megahead.objectives.auxiliary import held_out_row_collator
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "intermediate_size": 64, "max_positions": 32, "local_window": 6},
}


def encoder(folder: Path, name: str, changes: dict[str, Any], family: str = "bert") -> RunConfig:
    fixed = {
        "model": {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 63} | FAMILIES[family],
        "masking": MASKS,
        "objective": {"phrases": {"group_samples": 2, "longest": 4}, "group_samples": 2},
        "optimizer.eps": 1e-4,
        "output_dir": str(folder / name),
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("bert", 2, stage(2) | {"batch.micro_size": 4, "engine.activation_checkpointing": True}),
        long("bert", 4, stage(3) | {"engine.embedding": "rows"}),
        ("modernbert", 2, stage(1) | {"parallel": {"tensor": 2}, "engine.embedding": "rows", "data.prefetch": 0}),
        long("modernbert", 4, stage(1) | {"parallel": {"tensor": 2, "sequence": True}, "data.prefetch": 0}),
    ],
    ids=str,
)
def test_every_mesh_takes_the_same_course_and_a_resume_is_bitwise(
    tmp_path: Path, family: str, ranks: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    on_ranks(1, run, encoder(tmp_path, "alone", {}, family))
    on_ranks(ranks, run, encoder(tmp_path, "meshed", changes, family))
    on_ranks(1, run, encoder(tmp_path, "run", {}, family), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    alone, meshed = (read_metrics(tmp_path / name).training for name in ("alone", "meshed"))
    for value in ("loss", "phrase_loss", "phrase_found", "phrase_ends"):
        assert [r[value] for r in meshed] == pytest.approx([r[value] for r in alone], abs=2e-5), value
    assert sum(r["phrase_ends"] for r in alone) > 30


def test_phrases_are_found_better_and_exports_and_held_out_rows_have_nothing_of_it(tmp_path: Path) -> None:
    write_text(tmp_path)
    asked = {
        "objective": {"phrases": {"group_samples": 8, "temperature": 1.0}},
        "batch": {"global_size": 8, "micro_size": 8},
    }
    config = encoder(tmp_path, "run", asked | {"training.steps": 30, "optimizer.learning_rate": 1e-2})
    on_ranks(1, run, config)
    losses = [record["phrase_loss"] for record in read_metrics(tmp_path / "run").training]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    held_out = held_out_row_collator(config)
    assert held_out is not None
    assert held_out.batch(np.full((8, 22), 5), range(8)).auxiliary == ()
    assert evaluation_target_counts(config, torch.ones(63, dtype=torch.int64)) is not None  # not those of phrases
    export(tmp_path / "run", tmp_path / "out", "pmi")  # compares it with the model that was trained
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"masking": MASKS | {"masks_from_layer": 1}},
        {"masking": MASKS | {"mask_decoder_layers": 1}},
        {"masking": MASKS | {"dropping": {"from_layer": 1}, "adapt_every": 2}},
        {"masking": MASKS | {"strategy": "hardest", "adapt_every": 2, "count": "bernoulli"}},
        {"objective": {"name": "vanilla", "tied": True, "phrases": {"group_samples": 2}}},
    ],
    ids=str,
)
def test_it_goes_with_other_masks_and_with_the_vanilla_softmax(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    on_ranks(1, run, encoder(tmp_path, "run", changes))
    first, *_, last = read_metrics(tmp_path / "run").training
    assert last["loss"] < first["loss"]
    assert last["phrase_ends"] > 5
