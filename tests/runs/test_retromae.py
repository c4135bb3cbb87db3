"""RetroMAE and TSDAE end to end: [CLS] learns to tell texts apart, a resume is bitwise, and exports have the encoder
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf.export import ensure_hf_folder, export
from megahead.objectives.auxiliary import held_out_row_collator
from megahead.objectives.pretraining import initial_weights, weight_shapes
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import VOCABULARY, same_tensors, small_config, stage, write_text

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}


TSDAE = {"tsdae": {"deletion_rate": 0.5}, "group_samples": 4}


def config_of(folder: Path, family: str = "bert", **changes: Any) -> RunConfig:
    fixed = {
        "model": MODEL | {"family": family, "max_positions": 32, "hidden_dropout": 0.1},
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.3},
        "objective": {"retromae": {"decoder_rate": 0.9}, "group_samples": 4},
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (
            {"retromae": {"decoder_rate": 1.0, "bag_weight": 0.5}},
            "with 100% of its tokens masked (weight 1), and as sets of tokens from all outputs (weight 0.5)",
        ),
        (
            {"tsdae": {"deletion_rate": 0.4}},
            "from left to right, 40% of the tokens deleted before (weight 1)",
        ),
    ],
    ids=str,
)
def test_the_decoder_learns_what_cls_tells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], objective: dict[str, Any], told: str
) -> None:
    """Each document is of three tokens of its own, in any order."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=VOCABULARY) as writer:
        for _ in range(400):
            writer.add_document([*random.choice(random.integers(1, VOCABULARY, 3), 22).tolist(), 0])
    longer = {
        "training": {"steps": 100, "log_seconds": 0, "evaluate_every": 100},
        "batch": {"global_size": 16, "micro_size": 16},
        "optimizer": {"learning_rate": 1e-2},
        "objective": objective,
    }
    on_ranks(1, run, config_of(tmp_path, **longer))
    records = read_metrics(tmp_path / "run").training
    losses = [record["decoder_loss"] for record in records]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    if "retromae" in objective:
        bags = [record["decoder_bag"] for record in records]
        assert sum(bags[-5:]) < 0.85 * sum(bags[:5])
    for record in records:
        parts = record["encoder_loss"], record["decoder_loss"], 0.5 * record.get("decoder_bag", 0.0)
        assert record["loss"] == pytest.approx(sum(parts))
    assert f"texts read back from [CLS] by a decoder {told}" in capfd.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        long({}),
        {"engine.embedding": "rows", "optimizer.eps": 1e-4, "objective.retromae.bag_weight": 0.5},
        long({"objective": {"name": "vanilla", "tied": True, "retromae": {"bag_weight": 0.5}}}),
        long({"objective": TSDAE, "engine.embedding": "rows", "optimizer.eps": 1e-4}),
    ],
    ids=str,
)
def test_a_resume_is_bitwise(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    on_ranks(2, run, config_of(tmp_path, output_dir=str(tmp_path / "through"), **stage(1), **changes))
    again = config_of(tmp_path, **stage(1), **changes)
    on_ranks(2, run, again, str(tmp_path / "through/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "through")


def test_an_encoder_of_masked_tokens_goes_on_with_a_new_decoder(tmp_path: Path) -> None:
    write_text(tmp_path)
    steps = {"training.steps": 3, "training.checkpoint_every": 3, "objective.group_samples": 4}
    on_ranks(1, run, config_of(tmp_path, output_dir=str(tmp_path / "masked"), objective={}, **steps))
    init = {"from_checkpoint": str(tmp_path / "masked"), "mode": "continue"}
    config = config_of(tmp_path, init=init, **{"optimizer.learning_rate": 1e-30}, **steps)
    on_ranks(2, run, config)
    masked, checkpoint = open_checkpoint(tmp_path / "masked"), open_checkpoint(tmp_path / "run")
    names = [name for name in checkpoint.names() if name.startswith("weight/")]
    assert {name for name in names if "retromae" in name} == {*names} - {*masked.names()}
    for name in names:
        is_new = name.startswith("weight/retromae.")
        expected = initial_weights(config).read(name.removeprefix("weight/")) if is_new else masked.read(name)
        torch.testing.assert_close(checkpoint.read(name), expected)


@pytest.mark.parametrize(
    ("family", "changes"), [("bert", {}), ("modernbert", {}), ("modernbert", {"objective": TSDAE})], ids=str
)
def test_exports_and_held_out_rows_have_nothing_of_it(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    config = config_of(tmp_path, family, **{"training.steps": 2, "training.evaluate_every": 2}, **changes)
    on_ranks(1, run, config)
    assert config.objective.auxiliary_name() in {name.split(".")[0] for name in weight_shapes(config)}
    held_out = held_out_row_collator(config).batch(np.full((8, 22), 5), range(8))
    assert held_out.auxiliary == ()
    assert held_out.positions_BT is None
    exported = AutoModelForMaskedLM.from_pretrained(ensure_hf_folder(tmp_path / "run"))
    assert not [
        name
        for name in exported.state_dict()
        if "decoder.positions" in name or config.objective.auxiliary_name() in name
    ]
    export(tmp_path / "run", tmp_path / "out", "pmi")  # compares it with the model that was trained


@pytest.mark.parametrize(
    "changes",
    [
        long({"masking.masks_from_layer": 1}),
        long({"masking.strategy": "hardest", "masking.adapt_every": 2, "masking.count": "bernoulli"}),
        {"data.pack": "best_fit", "data.documents_a_row": 1, "engine.precision": "bf16"},
        long({"objective.score": "cosine", "objective.temperature": 0.1, "objective.learned_temperature": True}),
        long({"objective": TSDAE, "masking.masks_from_layer": 1}),
        {"objective": TSDAE, "data.pack": "best_fit", "engine.precision": "bf16", "model.num_layers": 4}
        | {"masking.dropping": {"from_layer": 1, "keep_share": 0.4}},
    ],
    ids=str,
)
def test_it_goes_with_other_masks_rows_and_scores(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    on_ranks(1, run, config_of(tmp_path, **({"training.steps": 12} | changes)))
    first, *_, last = read_metrics(tmp_path / "run").training
    assert last["decoder_loss"] < first["decoder_loss"]
