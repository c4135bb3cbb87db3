"""Encoders whose middle layers drop tokens: the same on every mesh, resumed bitwise, ordinary when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError
from megahead.hf.export import export
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

MODEL = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "intermediate_size": 64, "max_positions": 32, "local_window": 6},
}
IDS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
MASKS = IDS | {"adapt_every": 2}


def encoder(folder: Path, name: str, family: str, changes: dict[str, Any]) -> RunConfig:
    fixed = {
        "model": {**MODEL, **FAMILIES[family]},
        "masking": MASKS | {"dropping": {"from_layer": 1, "keep_share": 0.4}},
        "optimizer.eps": 1e-4,
        "training.steps": 9,
        "training.evaluate_every": 9,
        "output_dir": str(folder / name),
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        long("bert", 2, stage(2) | {"batch.micro_size": 1, "engine.activation_checkpointing": True}),
        long("bert", 4, stage(1) | {"parallel.tensor": 2, "data.prefetch": 0}),
        ("modernbert", 2, stage(1) | {"parallel.tensor": 2, "engine.embedding": "rows", "data.prefetch": 0}),
        long("modernbert", 4, stage(3) | {"engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_every_mesh_takes_the_same_course_and_a_resume_is_bitwise(
    tmp_path: Path, family: str, ranks: int, changes: dict[str, Any]
) -> None:
    """Nine steps are four periods: what is kept follows misses from the fifth on."""
    write_text(tmp_path)
    group = {"objective.group_samples": 2}
    on_ranks(1, run, encoder(tmp_path, "alone", family, group))
    on_ranks(ranks, run, encoder(tmp_path, "meshed", family, group | changes))
    on_ranks(1, run, encoder(tmp_path, "run", family, group), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    alone, meshed = (read_metrics(tmp_path / name) for name in ("alone", "meshed"))
    assert [r["loss"] for r in meshed.training] == pytest.approx([r["loss"] for r in alone.training], abs=1e-5)
    assert meshed.validation[-1]["loss"] == pytest.approx(alone.validation[-1]["loss"], abs=2e-5)
    counts = [open_checkpoint(tmp_path / name).read("state/difficulty") for name in ("alone", "meshed")]
    assert counts[0][0].sum() > 0
    assert torch.equal(*counts)


def test_nothing_of_it_is_left_in_held_out_rows_and_exports(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = encoder(tmp_path, "run", "bert", {})
    on_ranks(1, run, config)
    text = torch.randint(1, 60, (4, 22), generator=torch.Generator().manual_seed(0)).numpy()
    assert held_out_collator(config).batch(text, range(4)).token_subsets == ()  # type: ignore[union-attr]
    export(tmp_path / "run", tmp_path / "out", "pmi")  # compares it with the model that was trained
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 4


def test_what_a_file_says_is_kept_in_a_run_that_goes_on_with_the_same_file_alone(tmp_path: Path) -> None:
    write_text(tmp_path)
    masking = IDS | {"dropping": {"from_layer": 1, "by": "weights"}}
    for name, weights in {"one": np.arange(1, 61), "other": np.arange(60, 0, -1)}.items():
        np.save(tmp_path / f"{name}.npy", weights)
    one, other = (
        encoder(tmp_path, "run", "bert", {"masking": masking, "data.id_weights": str(tmp_path / f"{name}.npy")})
        for name in ("one", "other")
    )
    on_ranks(1, run, one)
    assert "state/difficulty" not in open_checkpoint(tmp_path / "run").names()
    with pytest.raises(CheckpointError, match=r"differs in data\.id_weights"):
        pretrain(other, resume=str(tmp_path / "run/checkpoints/step-00000003"))


def test_other_weights_are_learned_by_masks_that_enter_late_and_middle_layers_that_drop(tmp_path: Path) -> None:
    write_text(tmp_path)
    both = MASKS | {"masks_from_layer": 1, "dropping": {"from_layer": 1, "keep_share": 0.4}}
    late = IDS | {"masks_from_layer": 1}
    losses = []
    for name, masking in {"both": both, "late": late, "dropping": None}.items():
        on_ranks(1, run, encoder(tmp_path, name, "bert", {"masking": masking} if masking else {}))
        losses.append(read_metrics(tmp_path / name).training[-1]["loss"])
    assert len(set(losses)) == 3
    assert all(loss == pytest.approx(losses[0], abs=0.5) for loss in losses)
