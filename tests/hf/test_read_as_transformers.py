"""A folder means what transformers takes it for: settings that config.json leaves out, old keys beside new ones, and
tied weights of which one, both, or two different ones are stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.decoders import DECODERS
from megahead.hf.export import export
from megahead.hf.families import GLOBAL, LOCAL, filled_settings
from megahead.hf.importing import FAMILIES, find_family, from_hf
from megahead.hf.loading import load_causal, load_masked

SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
SIZES |= {"vocab_size": 99, "max_position_embeddings": 70, "num_key_value_heads": 2}
OTHER_SIZES = {
    "distilbert": {"n_layers": 6, "dim": 64, "n_heads": 4, "hidden_dim": 96, "vocab_size": 99},
    "gpt2": {"n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 99, "n_positions": 70},
    "mistral": SIZES | {"sliding_window": None},
    **dict.fromkeys(("roberta", "xlm-roberta"), SIZES | {"type_vocab_size": 1}),
}
LINEAR, SCALED = {"type": "linear", "factor": 3.0}, {"rope_type": "llama3", "factor": 2.0}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
THETA = {"rope_type": "default", "rope_theta": 9.0}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"use_sliding_window": True}) for name in ("qwen2", "qwen3")),
    ("mistral", {"sliding_window": 4096}),
    *(("llama", {"rope_scaling": scaling, "rope_theta": 77.0}) for scaling in (LINEAR, SCALED)),
    ("gemma3_text", {"rope_scaling": SCALED, "original_max_position_embeddings": 16}),
    *(("llama", {"rope_scaling": LINEAR, "rope_parameters": THETA} | theta) for theta in ({}, {"rope_theta": 7.0})),
    ("gpt_neox", {"rope_scaling": THETA | {"rope_theta": 5.0}, "rope_parameters": THETA, "rotary_emb_base": 3.0}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 7.0}),
    ("modernbert", {"global_rope_theta": 5.0, "global_attn_every_n_layers": 2}),
    ("gemma3_text", {"layer_types": [LOCAL, GLOBAL] * 3, "sliding_window_pattern": None}),
    ("modernbert", {"layer_types": [GLOBAL, LOCAL] * 3, "global_attn_every_n_layers": None}),
]


def settings_or_refusal(name: str, hf_config: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return filled_settings(ModelConfig(**FAMILIES[name].model_settings(hf_config)))
    except FieldError as error:
        return error.field


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_config_json_has_the_settings_that_transformers_reads_in_it(name: str, change: dict[str, Any]) -> None:
    """What transformers reads in it is what it writes again."""
    hf_config = copy.deepcopy(OTHER_SIZES.get(name, SIZES) | change)
    whole = CONFIG_MAPPING[name](**copy.deepcopy(hf_config)).to_dict()
    found = settings_or_refusal(name, {"model_type": name, **hf_config})
    assert found == settings_or_refusal(name, whole)
    has_window = bool(change.keys() & {"use_sliding_window", "sliding_window"})  # which alone is refused
    assert isinstance(found, str) == has_window, found


@pytest.mark.parametrize("stored", [{}, {"original_max_position_embeddings": 32}], ids=str)
def test_the_positions_of_llama3_that_stand_outside_of_rope_parameters_count(stored: dict[str, int]) -> None:
    hf_config = {**SIZES, "rope_scaling": SCALED | stored, "original_max_position_embeddings": 16}
    theirs = transformers.LlamaModel(transformers.LlamaConfig(**copy.deepcopy(hf_config)))
    scaling = ModelConfig(**FAMILIES["llama"].model_settings(hf_config)).rotary_scaling
    assert scaling is not None
    assert scaling.original_positions == theirs.config.rope_parameters["original_max_position_embeddings"] == 16


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.head_type == "CausalLM"])
def test_a_decoder_that_reads_in_both_directions_is_refused(name: str) -> None:
    """As transformers 5 reads a causal model's `is_causal: false` or null."""
    assert find_family({"model_type": name, "is_causal": True}) is FAMILIES[name]
    for value in (False, None):
        with pytest.raises(FieldError, match=r"^`config\.json: is_causal` must be true or missing"):
            find_family({"model_type": name, "is_causal": value})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_size_that_is_null_is_refused_as_one_that_is_missing(name: str) -> None:
    sizes = OTHER_SIZES.get(name, SIZES)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layers"):
        if key in sizes:
            assert settings_or_refusal(name, sizes | {key: None}) == f"config.json: {key}"


@pytest.mark.parametrize(("name", "key"), [("gpt2", "resid_pdrop"), ("modernbert", "embedding_dropout")])
def test_a_dropout_that_is_null_is_refused(name: str, key: str) -> None:
    assert "drop" in settings_or_refusal(name, OTHER_SIZES.get(name, SIZES) | {key: None})


@pytest.mark.parametrize("name", DECODERS)
def test_exports_of_decoders_keep_keys_and_values_while_they_generate(name: str) -> None:
    family = FAMILIES[name]
    settings = family.model_settings({"model_type": name, **OTHER_SIZES.get(name, SIZES)})
    assert family.hf_config(ModelConfig(**settings))["use_cache"] is True


KINDS = {
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", "gpt_neox.embed_in.weight", "embed_out.weight"),
    "LlamaForCausalLM": ("LlamaConfig", "model.embed_tokens.weight", "lm_head.weight"),
    "BertForMaskedLM": ("BertConfig", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "RobertaForMaskedLM": ("RobertaConfig", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
}
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SHAPE |= {"vocab_size": 61, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
SHAPE |= {"initializer_range": 0.3, "eos_token_id": 0, "bos_token_id": 0}
SPECIAL_IDS = {"mask_token": 4, "cls_token": 2, "sep_token": 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["untied", "different", "head alone"])
def test_the_head_is_the_one_that_transformers_uses(tmp_path: Path, kind: str, stored: str) -> None:
    """An untied BERT adds the bias of its decoder; weights that are to be tied, but differ, are not; of equal ones one
    is enough."""
    config, embedding, head = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**SHAPE, tie_word_embeddings=stored != "untied"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs)
    if stored != "untied":
        tensors = load_file(theirs / "model.safetensors")
        different = {head: tensors[embedding] + torch.rand_like(tensors[embedding])}
        tensors |= different if stored == "different" else {head: tensors.pop(embedding)}
        save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    ours = export(from_hf(theirs, tmp_path / "run", special_ids=SPECIAL_IDS), tmp_path / "ours", "trained").folder
    ids = torch.tensor([[5, 8, 6, 9, 7, 8]])
    load = load_causal if "Causal" in kind else load_masked
    expected, logits = (load(folder)(ids).logits for folder in (theirs, ours))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
