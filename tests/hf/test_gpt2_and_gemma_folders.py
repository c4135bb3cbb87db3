"""Folders of GPT-2 and Gemma 3 come in and go out; with which heads, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
)

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.errors import UserError
from megahead.hf.export import export
from megahead.hf.importing import from_hf
from megahead.hf.loading import load_causal
from megahead.hf.trained import TrainedModel
from support.small_checkpoint import save_small, small_config

GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
GEMMA: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 12}
GEMMA |= {"num_key_value_heads": 2, "intermediate_size": 100, "max_position_embeddings": 64, "sliding_window": 8}
GEMMA |= {"sliding_window_pattern": 2, "pad_token_id": 0}
CONFIGS: dict[Any, Any] = {
    GPT2LMHeadModel: lambda **settings: GPT2Config(**GPT2 | settings),
    GPT2Model: lambda **settings: GPT2Config(**GPT2 | settings),
    Gemma3ForCausalLM: lambda **settings: Gemma3TextConfig(**GEMMA | settings),
    Gemma3TextModel: lambda **settings: Gemma3TextConfig(**GEMMA | settings),
}


def save_theirs(folder: Path, kind: Any, **settings: Any) -> Path:
    """A tiny random model as transformers saves it."""
    torch.manual_seed(0)
    model = kind(CONFIGS[kind](vocab_size=61, bos_token_id=0, eos_token_id=0, **settings))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "settings", "head"),
    [
        (GPT2LMHeadModel, {"n_inner": 100, "activation_function": "gelu"}, "trained"),
        (GPT2LMHeadModel, {"tie_word_embeddings": False}, "trained"),
        (GPT2Model, {}, "none"),
        (Gemma3ForCausalLM, {"query_pre_attn_scalar": 20}, "trained"),
        (Gemma3ForCausalLM, {"tie_word_embeddings": False, "num_hidden_layers": 1}, "trained"),
        (Gemma3TextModel, {}, "none"),
    ],
)
def test_there_and_back_is_bitwise(tmp_path: Path, kind: Any, settings: dict[str, Any], head: Any) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind, **settings)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = stored(theirs), stored(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    old, new = read_config(theirs), read_config(back)
    assert {key: new.get(key) for key in old} == old


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, Gemma3ForCausalLM])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_go_in_and_out_bit_for_bit(tmp_path: Path, kind: Any, dtype: str) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind)
    halved = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored(theirs).items()}
    save_file(halved, theirs / "model.safetensors", metadata={"format": "pt"})
    after = stored(export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", "trained", dtype=dtype).folder)
    assert all(torch.equal(tensor, after[name]) for name, tensor in halved.items())


def test_the_published_gpt2_is_read_by_its_own_names(tmp_path: Path) -> None:
    """Its file holds a backbone's names, and masks; its config.json names a model that is tied, and does not say so."""
    theirs = save_theirs(tmp_path / "theirs", GPT2LMHeadModel)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored(theirs).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    save_file({**tensors, **masks}, theirs / "model.safetensors", metadata={"format": "pt"})
    content = {key: value for key, value in read_config(theirs).items() if key != "tie_word_embeddings"}
    (theirs / "config.json").write_text(json.dumps({**content, "n_ctx": 64}))
    config = config_from_dict(open_checkpoint(from_hf(theirs, tmp_path / "run")).config)
    assert (config.objective.name, config.objective.tied, config.data.sequence_length) == ("vanilla", True, 64)


def test_settings_of_older_gemmas_are_understood(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", Gemma3ForCausalLM)
    content = read_config(theirs)
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        del content[key]
    content |= {"rope_theta": 777.0, "rope_local_base_freq": 55.0, "sliding_window_pattern": 3}
    content |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (theirs / "config.json").write_text(json.dumps(content))
    config = config_from_dict(open_checkpoint(from_hf(theirs, tmp_path / "run")).config)
    model = config.model
    assert model.rotary_scaling is not None
    assert (model.rotary_base, model.local_rotary_base, model.rotary_scaling.factor) == (777.0, 55.0, 8.0)
    assert [model.is_local(layer) for layer in range(3)] == [True, True, False]
    assert (config.objective.name, config.objective.tied) == ("vanilla", True)
    back = export(tmp_path / "run", tmp_path / "back", "trained").folder
    assert export(from_hf(back, tmp_path / "again"), tmp_path / "twice", "trained").parity.tokens > 0


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (GPT2LMHeadModel, {"activation_function": "relu"}, "activation_function` must be one of gelu_new"),
        (GPT2LMHeadModel, {"scale_attn_weights": False}, "scale_attn_weights` must be true, but is false"),
        (GPT2LMHeadModel, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx` must be false, but is true"),
        (GPT2LMHeadModel, {"add_cross_attention": True}, "add_cross_attention` must be false"),
        (GPT2LMHeadModel, {"embd_pdrop": 0.3}, r"embd_pdrop` must be 0\.1, as resid_pdrop, but is 0\.3"),
        (Gemma3ForCausalLM, {"final_logit_softcapping": 30.0}, r"final_logit_softcapping` must be null, but is 30\.0"),
        (Gemma3ForCausalLM, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping` must be null"),
        (Gemma3ForCausalLM, {"use_bidirectional_attention": True}, "use_bidirectional_attention` must be false"),
        (Gemma3ForCausalLM, {"attention_bias": True}, "attention_bias` must be false"),
        (Gemma3ForCausalLM, {"sliding_window": 7}, "sliding_window` must be an even number of tokens, but is 7"),
        (Gemma3ForCausalLM, {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types`"),
        (Gemma3ForCausalLM, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "linear or llama3, but is yarn"),
        (
            Gemma3ForCausalLM,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention.rope_type` must be default",
        ),
        (
            Gemma3ForCausalLM,
            {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "sliding_attention.rope_type` must be default, but is linear",
        ),
        (Gemma3ForCausalLM, {"model_type": "gemma3"}, "model_type` must be one of .*gemma3_text"),
    ],
    ids=str,
)
def test_models_that_ours_cannot_be_are_refused(tmp_path: Path, kind: Any, change: Any, sentence: str) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind)
    (theirs / "config.json").write_text(json.dumps(read_config(theirs) | change))
    with pytest.raises(UserError, match=sentence):
        from_hf(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("temperature", "keep_padding"), [(1.0, False), (0.7, True)])
def test_the_training_free_head_of_a_gpt2_goes_out_exactly(
    tmp_path: Path, temperature: float, keep_padding: bool
) -> None:
    """Folded into its last norm; the export generates token by token as it scores all at once."""
    save_small(tmp_path / "run", small_config(model={"family": "gpt2"}, objective={"temperature": temperature}))
    folder = export(tmp_path / "run", tmp_path / "out", "pmi", keep_padding=keep_padding).folder
    ours, ids = TrainedModel.open(tmp_path / "run"), torch.arange(60).view(2, 30)
    model = load_causal(folder)
    with torch.no_grad():
        hidden = ours.load().backbone(ids)
        matrix = ours.weight("backbone.embedding.weight")[:61]
        expected = hidden @ matrix.T / temperature + ours.training_free_bias()
        torch.testing.assert_close(model(ids).logits[..., :61], expected, rtol=1e-5, atol=2e-4)
    assert "lm_head.weight" in stored(folder)
    assert_generates(model)


def test_a_headless_gemma_goes_out_with_its_embedding_as_a_head_and_no_other(tmp_path: Path) -> None:
    model = {"family": "gemma3", "num_key_heads": 1, "head_dim": 8, "local_window": 4, "global_every": 2}
    save_small(tmp_path / "run", small_config(model=model))
    with pytest.raises(UserError, match=r"`--head pmi.* needs a bias in the head, but no class .*Gemma 3"):
        export(tmp_path / "run", tmp_path / "out", "pmi")
    loaded = load_causal(export(tmp_path / "run", tmp_path / "out", "tied").folder)
    ours, ids = TrainedModel.open(tmp_path / "run").load(), torch.arange(60).view(2, 30)
    with torch.no_grad():
        expected = ours.backbone(ids) @ ours.backbone.embedding.weight[:61].T
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=2e-4)
    assert_generates(loaded)


def assert_generates(model: Any) -> None:
    """Greedily with a cache, beyond a local window, as without one."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    generated = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, ids)
