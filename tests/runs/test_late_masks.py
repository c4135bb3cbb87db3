"""Mask tokens that enter later, or in a decoder: the same on every mesh, resumed bitwise, exported without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator, training_collator
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.hf.export import ensure_hf_folder, export
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

MODEL = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "intermediate_size": 64, "max_positions": 32, "local_window": 6},
}


def encoder(folder: Path, name: str, family: str, changes: dict[str, Any]) -> RunConfig:
    fixed = {
        "model": {**MODEL, **FAMILIES[family]},
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.4, "masks_from_layer": 2},
        "optimizer.eps": 1e-4,
        "output_dir": str(folder / name),
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        long("bert", 2, stage(2) | {"parallel.tensor": 2, "engine.activation_checkpointing": True}),
        ("modernbert", 2, stage(3) | {"engine.embedding": "rows"}),
        long(
            "bert",
            4,
            stage(2) | {"batch.micro_size": 1, "parallel.tensor": 2, "engine.activation_checkpointing": True},
        ),
        long("modernbert", 4, stage(3) | {"engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_every_mesh_takes_the_same_course_and_a_resume_is_bitwise(
    tmp_path: Path, family: str, ranks: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    group = {"objective.group_samples": 2}
    on_ranks(1, run, encoder(tmp_path, "alone", family, group))
    on_ranks(ranks, run, encoder(tmp_path, "meshed", family, group | changes))
    on_ranks(1, run, encoder(tmp_path, "run", family, group), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    one, meshed = (read_metrics(tmp_path / name) for name in ("alone", "meshed"))
    assert meshed.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=2e-5)
    assert [r["loss"] for r in meshed.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    with pytest.raises(
        UserError, match=r"`--head pmi` needs .* but this one reads mask tokens from layer 2 on; use none"
    ):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    assert AutoModel.from_pretrained(ensure_hf_folder(tmp_path / "run")).config.vocab_size == 63


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, stage(1) | {"parallel.tensor": 2}),
        long(2, stage(3) | {"batch.micro_size": 1, "engine.embedding": "rows"}),
        long(4, stage(1) | {"parallel.tensor": 2}),
    ],
    ids=str,
)
def test_a_decoder_of_masks_is_trained_on_every_mesh_and_left_out_of_exports(
    tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    masks = {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.4, "mask_decoder_layers": 2}
    alike: dict[str, Any] = {"masking": masks, "objective.group_samples": 2}
    on_ranks(1, run, encoder(tmp_path, "alone", "bert", alike))
    on_ranks(ranks, run, encoder(tmp_path, "meshed", "bert", alike | changes))
    on_ranks(1, run, encoder(tmp_path, "run", "bert", alike), str(tmp_path / "alone/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "alone")
    one, other = (read_metrics(tmp_path / name) for name in ("alone", "meshed"))
    assert [r["loss"] for r in other.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert other.validation[-1]["loss"] == pytest.approx(one.validation[-1]["loss"], abs=2e-5)
    first, last = (open_checkpoint(tmp_path / f"alone/checkpoints/step-0000000{step}") for step in (3, 6))
    for layer in range(5):  # all of them learn
        name = f"weight/backbone.blocks.{layer}.mlp.up.weight"
        assert not torch.equal(first.read(name), last.read(name))
    with pytest.raises(UserError, match=r"but this one reads mask tokens in a decoder of its own; use none"):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    exported = AutoModel.from_pretrained(ensure_hf_folder(tmp_path / "run"), add_pooling_layer=False)
    assert exported.config.num_hidden_layers == 3
    there = exported.encoder.layer[2].output.dense.weight
    assert torch.equal(there, last.read("weight/backbone.blocks.2.mlp.down.weight"))


def test_held_out_rows_are_masked_as_ever_with_mask_tokens_where_the_model_knows_them(tmp_path: Path) -> None:
    config = encoder(tmp_path, "run", "bert", {})
    masks = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
    decoder = encoder(tmp_path, "run", "bert", {"masking": masks | {"mask_decoder_layers": 1}})
    plain = encoder(tmp_path, "run", "bert", {"masking": masks})
    text = torch.randint(1, 60, (4, 22), generator=torch.Generator().manual_seed(0)).numpy()
    late, early = (held_out_collator(one).batch(text, range(4)) for one in (config, plain))  # type: ignore[union-attr]
    assert torch.equal(late.input_ids_BT, early.input_ids_BT)
    assert early.token_subsets == ()
    for one, layers in ((config, 2), (decoder, 3)):
        assert held_out_collator(one).batch(text, range(4)).token_subsets[0].layers == range(layers)  # type: ignore[union-attr]
    for collator in (held_out_collator(config), training_collator(config, []), training_collator(decoder, [])):
        batch = collator.batch(text, range(4))  # type: ignore[union-attr]
        (early_tokens,) = batch.token_subsets
        seen = batch.input_ids_BT.flatten()[early_tokens.index_N]
        assert 60 not in seen
        assert len(seen) + int((batch.input_ids_BT == 60).sum()) == batch.input_ids_BT.numel()
        assert batch.to("meta").token_subsets[0].index_N.is_meta
