"""Folders of Llama, Mistral, Qwen 2 and Qwen 3 come in and go out; with which heads, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.errors import UserError
from megahead.hf.export import export
from megahead.hf.importing import from_hf
from megahead.hf.loading import load_causal
from megahead.hf.trained import TrainedModel
from support.small_checkpoint import save_small, small_config

CONFIGS = {
    LlamaForCausalLM: LlamaConfig,
    LlamaModel: LlamaConfig,
    MistralForCausalLM: MistralConfig,
    Qwen2ForCausalLM: Qwen2Config,
    Qwen3ForCausalLM: Qwen3Config,
    Qwen3Model: Qwen3Config,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 5e5}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_heads": 1, "rotary_scaling": {"kind": "linear", "factor": 2.0}},
    "qwen2": {"num_key_heads": 1, "attention_bias": "qkv"},
    "biases": {"attention_bias": "all", "mlp_bias": True, "head_dim": 20, "activation": "gelu_tanh"},
}
QWEN3 = {"family": "llama", "num_key_heads": 1, "qk_norm": True}


def save_theirs(folder: Path, kind: Any = LlamaForCausalLM, shard: str = "1GB", **settings: Any) -> Path:
    """A tiny random model as transformers saves it."""
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "intermediate_size": 100, "max_position_embeddings": 64}
    windows = {"sliding_window": None} if kind is MistralForCausalLM else {}
    config = CONFIGS[kind](**shape, **more, **windows, eos_token_id=0, **settings)
    model = kind(config)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("kind", "settings", "head"),
    [
        (LlamaForCausalLM, {"rope_parameters": LLAMA3, "head_dim": 8}, "trained"),
        (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "tied"),
        (LlamaModel, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "none"),
        (Qwen2ForCausalLM, {"tie_word_embeddings": True}, "tied"),
        (Qwen3ForCausalLM, {"head_dim": 12, "attention_bias": True}, "trained"),
        (Qwen3Model, {"head_dim": 16, "hidden_act": "gelu"}, "none"),
    ],
)
def test_there_and_back_is_bitwise(tmp_path: Path, kind: Any, settings: dict[str, Any], head: Any) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind, **settings)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = stored(theirs), stored(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    old, new = (CONFIGS[kind].from_pretrained(folder).to_dict() for folder in (theirs, back))
    for key in ("bos_token_id", "pad_token_id", "megahead", "dtype", "_name_or_path"):
        old.pop(key, None), new.pop(key, None)
    assert {key: new.get(key) for key in old} == old


def test_a_mistral_goes_out_as_the_llama_that_it_is(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", MistralForCausalLM, head_dim=10)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", "trained").folder
    assert json.loads((back / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        before, after = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (theirs, back))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)


def test_settings_of_older_writers_are_understood(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    for key in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
        content.pop(key, None)
    scaling = {"type": "linear", "factor": 4.0}
    content |= {"rope_theta": 777.0, "rope_scaling": scaling, "eos_token_id": [5, 6]}
    (theirs / "config.json").write_text(json.dumps(content))
    config = config_from_dict(open_checkpoint(from_hf(theirs, tmp_path / "run")).config)
    model = config.model
    assert model.rotary_scaling is not None
    assert (model.rotary_base, model.rotary_scaling.kind, model.rotary_scaling.factor) == (777.0, "linear", 4.0)
    assert (model.key_heads(), model.head_size(), config.data.end_token) == (2, 8, 5)
    (theirs / "config.json").write_text(json.dumps({**content, "eos_token_id": None}))
    assert open_checkpoint(from_hf(theirs, tmp_path / "endless")).config["data"]["end_token"] == 0


def test_shards_are_read_by_their_index_and_what_lies_beside_them_is_not(tmp_path: Path) -> None:
    """Mistral's folders hold the same weights once more, under other names."""
    theirs = save_theirs(tmp_path / "theirs", shard="40KB")
    assert len(list(theirs.glob("*.safetensors"))) > 1
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, theirs / "consolidated.safetensors")
    table = open_checkpoint(from_hf(theirs, tmp_path / "run")).read("weight/backbone.embedding.weight")
    assert torch.equal(table[:61], stored(theirs)["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_go_in_and_out_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    theirs = save_theirs(tmp_path / "theirs", Qwen3ForCausalLM)
    halved = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored(theirs).items()}
    save_file(halved, theirs / "model.safetensors", metadata={"format": "pt"})
    after = stored(export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", "trained", dtype=dtype).folder)
    assert all(torch.equal(tensor, after[name]) for name, tensor in halved.items())


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (LlamaForCausalLM, {"hidden_act": "relu"}, "hidden_act` must be one of silu"),
        (LlamaForCausalLM, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear or llama3, but is"),
        (LlamaForCausalLM, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor` must be given"),
        (LlamaForCausalLM, {"partial_rotary_factor": 0.5}, "partial_rotary_factor` must be 1"),
        (LlamaForCausalLM, {"quantization_config": {"bits": 4}}, "quantization_config` must be missing"),
        (MistralForCausalLM, {"sliding_window": 4096}, "sliding_window` must be null .* but is 4096"),
        (Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 32}, "sliding_window` must be null"),
        (Qwen3ForCausalLM, {"layer_types": ["sliding_attention"] * 2}, "layer_types` must be full_attention"),
        (Qwen3ForCausalLM, {"model_type": "qwen3_moe"}, "model_type` must be one of .*qwen3"),
    ],
    ids=str,
)
def test_models_that_ours_cannot_be_are_refused(tmp_path: Path, kind: Any, change: Any, sentence: str) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind)
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=sentence):
        from_hf(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "keep_padding"), [(1.0, False), (0.7, True)])
def test_the_training_free_head_of_a_llama_goes_out_exactly(
    tmp_path: Path, kind: str, temperature: float, keep_padding: bool
) -> None:
    """Beside a bias, in a class that has one; not tied, since programs pass over all that a tied head has stored."""
    config = small_config(model={"family": "llama"} | KINDS[kind], objective={"temperature": temperature})
    save_small(tmp_path / "run", config)
    folder = export(tmp_path / "run", tmp_path / "out", "pmi", keep_padding=keep_padding).folder
    ours, ids = TrainedModel.open(tmp_path / "run"), torch.arange(60).view(2, 30)
    with torch.no_grad():
        hidden = ours.load().backbone(ids)
        matrix = ours.weight("backbone.embedding.weight")[:61]
        expected = hidden @ matrix.T / temperature + ours.training_free_bias()
        model = AutoModelForCausalLM.from_pretrained(folder)
        logits = model(ids).logits
    assert logits.shape[-1] == (64 if keep_padding else 61)
    torch.testing.assert_close(logits[..., :61], expected, rtol=1e-5, atol=2e-4)
    assert {"lm_head.weight", "lm_head.bias"} < stored(folder).keys()
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert "the head's own" in (folder / "README.md").read_text()


def test_it_speaks_as_it_scores(tmp_path: Path) -> None:
    """Token by token, with what is kept of the past, as all at once."""
    save_small(tmp_path / "run", small_config(model={"family": "llama", "num_key_heads": 1}))
    model = load_causal(export(tmp_path / "run", tmp_path / "out", "pmi").folder)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    spoken = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(spoken, ids)


@pytest.mark.parametrize(("head", "keep_padding"), [("pmi", False), ("tied", True)])
def test_a_bias_beside_norms_of_queries_and_keys_is_refused(tmp_path: Path, head: Any, keep_padding: bool) -> None:
    save_small(tmp_path / "run", small_config(model=QWEN3))
    sentence = rf"`--head {head}.* needs a bias in the head, but no class of transformers has one beside .*Qwen 3"
    with pytest.raises(UserError, match=sentence):
        export(tmp_path / "run", tmp_path / "out", head, keep_padding=keep_padding)
    assert export(tmp_path / "run", tmp_path / "out", "tied").parity.tokens > 0
