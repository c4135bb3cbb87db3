"""A run that starts from a Hugging Face folder begins as that model: its perplexity, its table, its body."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import held_out_collator
from megahead.data.samples import EvenlySpacedSamples, SequentialSamples
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.hf.export import export
from megahead.hf.importing import HFModel
from megahead.objectives.pretraining import initial_weights
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import VOCABULARY, small_config, stage, write_text

HF_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"model.family": "llama", "model.num_key_heads": 2, "model.norm_eps": 1e-6, "model.rotary_base": 500.0}
STILL = {
    "training.steps": 1,
    "optimizer.learning_rate": 1e-30,
    "schedule.warmup_steps": 0,
}


def save_llama(folder: Path, **settings: Any) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(**HF_SHAPE, num_key_value_heads=2, intermediate_size=128, rope_parameters=rope, **settings)
    return saved(LlamaForCausalLM(config), folder)


def saved(model: Any, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model.eval()


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def begun(folder: Path, hf: Path, **changes: Any) -> RunConfig:
    init = {"from_hf": str(hf), "mode": "continue"}
    return small_config(folder, {"init": init, "data.isolate_documents": False} | STILL | changes)


def first_loss(folder: Path) -> float:
    """Held out, before the first step."""
    first = read_metrics(folder).validation[0]
    assert first["step"] == 0
    return float(first["loss"])


def their_loss(model: Any, folder: Path) -> float:
    rows = EvenlySpacedSamples(SequentialSamples(IndexedDataset(folder / "text"), 24), 10).read(range(10))[0]
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        logits: Tensor = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten()).item()


@pytest.mark.parametrize(("tensor", "zero", "tied"), [(1, 0, False), (1, 0, True), (2, 3, False), long(2, 3, True)])
def test_held_out_loss_before_any_learning_is_that_of_transformers(
    tmp_path: Path, tied: bool, tensor: int, zero: int
) -> None:
    write_text(tmp_path)
    model = save_llama(tmp_path / "hf", tie_word_embeddings=tied)
    objective = {"name": "vanilla", "tied": tied}
    changes = LLAMA | stage(zero) | {"objective": objective, "parallel.tensor": tensor}
    on_ranks(2, run, begun(tmp_path, tmp_path / "hf", **changes))
    assert first_loss(tmp_path / "run") == pytest.approx(their_loss(model, tmp_path), abs=1e-5)


@pytest.mark.parametrize(
    ("configs", "models", "settings", "ours"),
    [
        (MistralConfig, MistralForCausalLM, {"sliding_window": None}, {}),
        (Qwen2Config, Qwen2ForCausalLM, {}, {"model.attention_bias": "qkv"}),
        (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}, {"model.qk_norm": True}),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_llamas_relatives_begin_so_too(
    tmp_path: Path, configs: Any, models: Any, settings: dict[str, Any], ours: dict[str, Any]
) -> None:
    write_text(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    shape = HF_SHAPE | {"num_key_value_heads": 2, "intermediate_size": 128, "rope_parameters": rope}
    model = saved(models(configs(**shape, **settings, tie_word_embeddings=False)), tmp_path / "hf")
    changes = LLAMA | ours | {"objective": {"name": "vanilla"}}
    on_ranks(1, run, begun(tmp_path, tmp_path / "hf", **changes))
    assert first_loss(tmp_path / "run") == pytest.approx(their_loss(model, tmp_path), abs=1e-5)


def test_a_headless_run_takes_body_and_table_and_drops_the_head(tmp_path: Path) -> None:
    write_text(tmp_path)
    save_llama(tmp_path / "hf", tie_word_embeddings=False)
    config = begun(tmp_path, tmp_path / "hf", **LLAMA, **{"objective.learned_temperature": True})
    on_ranks(1, run, config)
    published, checkpoint = HFModel.open(tmp_path / "hf"), open_checkpoint(tmp_path / "run")
    names = [name for name in checkpoint.names() if name.startswith("weight/backbone.")]
    assert len(names) == len(published.slices) - 1
    assert "weight/head.weight" not in checkpoint.names()
    for name in names:
        weight = checkpoint.read(name)
        torch.testing.assert_close(weight, published.weight(name.removeprefix("weight/"), weight.shape))
    assert not checkpoint.read("weight/backbone.embedding.weight")[VOCABULARY:].any()


def test_it_learns_from_there_and_goes_on_without_the_folder(tmp_path: Path) -> None:
    write_text(tmp_path)
    save_llama(tmp_path / "hf")
    changes = LLAMA | {"training.steps": 6, "optimizer.learning_rate": 3e-3, "training.checkpoint_every": 3}
    on_ranks(1, run, begun(tmp_path, tmp_path / "hf", **changes))
    (tmp_path / "hf").rename(tmp_path / "gone")
    on_ranks(1, run, begun(tmp_path, tmp_path / "hf", **changes | {"training.steps": 12}))
    assert open_checkpoint(tmp_path / "run").step == 12
    losses = [record["loss"] for record in read_metrics(tmp_path / "run").training]
    assert losses[-1] < losses[0]
    assert export(tmp_path / "run", tmp_path / "out", "pmi").parity.tokens > 0


def test_a_gpt_neox_is_taken_too(tmp_path: Path) -> None:
    write_text(tmp_path)
    model = saved(GPTNeoXForCausalLM(GPTNeoXConfig(**HF_SHAPE, intermediate_size=128)), tmp_path / "hf")
    changes = {"model.activation": "gelu", "objective": {"name": "vanilla"}}
    on_ranks(1, run, begun(tmp_path, tmp_path / "hf", **changes))
    assert first_loss(tmp_path / "run") == pytest.approx(their_loss(model, tmp_path), abs=1e-5)


BERT: dict[str, Any] = {
    "model.family": "bert",
    "model.max_positions": 32,
    "masking": {"mask_token": 57, "cls_token": 58, "sep_token": 59},
}


def test_an_encoder_is_taken_with_its_transform(tmp_path: Path) -> None:
    write_text(tmp_path)
    saved(BertForMaskedLM(BertConfig(**HF_SHAPE, intermediate_size=128, max_position_embeddings=32)), tmp_path / "hf")
    changes = BERT | {"objective": {"name": "vanilla", "tied": True}}
    on_ranks(1, run, begun(tmp_path, tmp_path / "hf", **changes))
    published, checkpoint = HFModel.open(tmp_path / "hf"), open_checkpoint(tmp_path / "run")
    for name in ("backbone.positions.weight", "mask_head.dense.weight", "mask_head.bias"):
        weight = checkpoint.read(f"weight/{name}")
        torch.testing.assert_close(weight, published.weight(name, weight.shape))


def test_what_an_objective_adds_to_an_encoder_begins_as_in_a_new_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    saved(BertForMaskedLM(BertConfig(**HF_SHAPE, intermediate_size=128, max_position_embeddings=32)), tmp_path / "hf")
    config = begun(tmp_path, tmp_path / "hf", **BERT, **{"objective.retromae": {}})
    on_ranks(1, run, config)
    published, checkpoint = HFModel.open(tmp_path / "hf"), open_checkpoint(tmp_path / "run")
    names = [name for name in checkpoint.names() if name.startswith("weight/retromae.")]
    assert len(names) > 5
    for name in (name.removeprefix("weight/") for name in [*names, "weight/backbone.positions.weight"]):
        weight = checkpoint.read(f"weight/{name}")
        is_new = name.startswith("retromae.")
        expected = initial_weights(config).read(name) if is_new else published.weight(name, weight.shape)
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(("tensor", "zero"), [(1, 0), (2, 3)])
def test_a_modernbert_guesses_held_out_tokens_as_transformers_does(tmp_path: Path, tensor: int, zero: int) -> None:
    write_text(tmp_path)
    local = {"local_attention": 8, "pad_token_id": 0, "classifier_bias": True}
    model = saved(ModernBertForMaskedLM(ModernBertConfig(**HF_SHAPE, intermediate_size=64, **local)), tmp_path / "hf")
    changes = {
        "model": {"family": "modernbert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
        | {"vocab_size": VOCABULARY, "vocab_multiple": 64, "local_window": 8, "transform_bias": True},
        "masking": {"mask_token": 57, "cls_token": 58, "sep_token": 59},
        "objective": {"name": "vanilla", "tied": True},
        "parallel.tensor": tensor,
    }
    config = begun(tmp_path, tmp_path / "hf", **changes | stage(zero))
    on_ranks(2, run, config)
    collator, text = held_out_collator(config), IndexedDataset(tmp_path / "text")
    assert collator is not None
    rows = EvenlySpacedSamples(SequentialSamples(text, config.sample_length()), 10).read(range(10))[0]
    batch = collator.batch(rows, range(10))
    with torch.no_grad():
        logits = model(batch.input_ids_BT).logits.flatten(0, 1)[batch.target_index_N]
    expected = F.cross_entropy(logits.double(), batch.target_ids_N).item()
    assert first_loss(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model.rotary_base": 10000.0, "model.num_key_heads": 4},
            r"`model` must be that of .*/hf, but is another instead; set num_key_heads=2, rotary_base=500\.0\.",
        ),
        ({"init.from_hf": "nowhere"}, r"`init\.from_hf` must be a Hugging Face folder, but nowhere is none"),
        (
            {"objective": {"name": "vanilla", "tied": True}},
            r"`objective\.tied` must be false, as in .*/hf, but is true instead",
        ),
    ],
)
def test_another_model_than_the_folders_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    write_text(tmp_path)
    save_llama(tmp_path / "hf", tie_word_embeddings=False)
    with pytest.raises(UserError, match=sentence):
        pretrain(begun(tmp_path, tmp_path / "hf", **LLAMA | change))
    assert not (tmp_path / "run").exists()
