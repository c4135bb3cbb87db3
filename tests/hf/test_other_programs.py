"""What vLLM and llama.cpp read of an export is there: settings as transformers hands them on, names, tokenizer files.

The lists are what their sources name: vllm/model_executor/models/NAME.py, and convert_hf_to_gguf.py (later the folder
conversion/) with gguf-py's tensor_mapping.py. Both open config.json by `AutoConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from megahead.hf.export import export
from support.small_checkpoint import save_small, save_tokenizer, small_config

LAYERS = 2
ENCODER = {"masking": {"mask_token": 2, "cls_token": 3, "sep_token": 4, "special_tokens": [1]}}
LLAMA = {"family": "llama", "num_key_heads": 1}


@dataclass(frozen=True)
class Listed:
    """What is read of a class."""

    settings: str
    """As vLLM asks its config object for them."""

    tensors: str
    """Outside of layers; both programs have a place for each, and want each."""

    layer: str
    """In each layer, after `prefix`."""

    prefix: str
    gguf: str = ""
    """Settings that llama.cpp's converter cannot do without, beside those of vLLM."""


_SHAPE = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"
_LLAMA = f"{_SHAPE} num_key_value_heads hidden_act rms_norm_eps rope_parameters tie_word_embeddings head_dim"
_LLAMA_LAYER = (
    "input_layernorm.weight post_attention_layernorm.weight self_attn.q_proj.weight self_attn.k_proj.weight "
    "self_attn.v_proj.weight self_attn.o_proj.weight mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight"
)
_LLAMA_ENDS = "model.embed_tokens.weight model.norm.weight"


def _both(*names: str) -> str:
    return " ".join(f"{name}.{part}" for name in names for part in ("weight", "bias"))


LISTED = {
    "GPTNeoXForCausalLM": Listed(
        f"{_SHAPE} hidden_act layer_norm_eps use_parallel_residual rope_parameters tie_word_embeddings",
        f"gpt_neox.embed_in.weight embed_out.weight {_both('gpt_neox.final_layer_norm')}",
        _both("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense")
        + " "
        + _both("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "gpt_neox.layers",
    ),
    "LlamaForCausalLM": Listed(f"{_LLAMA} attention_bias mlp_bias", _LLAMA_ENDS, _LLAMA_LAYER, "model.layers"),
    "Qwen2ForCausalLM": Listed(
        _LLAMA.replace(" head_dim", ""),
        _LLAMA_ENDS,
        f"{_LLAMA_LAYER} self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
        "model.layers",
    ),
    "Qwen3ForCausalLM": Listed(
        f"{_LLAMA} attention_bias",
        _LLAMA_ENDS,
        f"{_LLAMA_LAYER} self_attn.q_norm.weight self_attn.k_norm.weight",
        "model.layers",
    ),
    "GPT2LMHeadModel": Listed(
        f"{_SHAPE.replace('intermediate_size', 'n_inner')} activation_function layer_norm_epsilon scale_attn_weights "
        "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn add_cross_attention tie_word_embeddings",
        f"transformer.wte.weight transformer.wpe.weight {_both('transformer.ln_f')}",
        _both("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        "transformer.h",
        gguf="n_ctx n_embd n_head",
    ),
    "Gemma3ForCausalLM": Listed(
        f"{_LLAMA.replace('hidden_act ', '')} hidden_activation query_pre_attn_scalar attention_bias layer_types "
        "sliding_window attn_logit_softcapping final_logit_softcapping",
        _LLAMA_ENDS,
        f"{_LLAMA_LAYER} self_attn.q_norm.weight self_attn.k_norm.weight pre_feedforward_layernorm.weight "
        "post_feedforward_layernorm.weight",
        "model.layers",
    ),
    "ModernBertModel": Listed(
        f"{_SHAPE} norm_eps norm_bias attention_bias mlp_bias local_attention layer_types rope_parameters "
        "deterministic_flash_attn classifier_pooling classifier_bias classifier_activation",
        "embeddings.tok_embeddings.weight embeddings.norm.weight final_norm.weight",
        "attn_norm.weight attn.Wqkv.weight attn.Wo.weight mlp_norm.weight mlp.Wi.weight mlp.Wo.weight",
        "layers",
        gguf="hidden_activation",
    ),
    "BertModel": Listed(
        f"{_SHAPE} hidden_act layer_norm_eps type_vocab_size",
        "embeddings.word_embeddings.weight embeddings.position_embeddings.weight "
        f"embeddings.token_type_embeddings.weight {_both('embeddings.LayerNorm')}",
        _both("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        + " "
        + _both("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
        "encoder.layer",
    ),
}

LISTED |= dict.fromkeys(("RobertaModel", "XLMRobertaModel"), LISTED["BertModel"])
"""Positions of both begin after pad_token_id."""

EXPORTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GPTNeoXForCausalLM", "pmi", {}),
    ("LlamaForCausalLM", "tied", LLAMA),
    ("Qwen2ForCausalLM", "tied", LLAMA | {"attention_bias": "qkv"}),
    ("Qwen3ForCausalLM", "tied", LLAMA | {"qk_norm": True}),
    ("GPT2LMHeadModel", "tied", {"family": "gpt2"}),
    ("Gemma3ForCausalLM", "tied", {"family": "gemma3", "num_key_heads": 1}),
    ("ModernBertModel", "none", {"family": "modernbert"}),
    ("BertModel", "none", {"family": "bert"}),
    ("RobertaModel", "none", {"family": "roberta"}),
    ("XLMRobertaModel", "none", {"family": "xlm_roberta"}),
]


def exported(folder: Path, head: Any, model: dict[str, Any]) -> Path:
    save_tokenizer(folder / "tokenizer.json")
    sections = ENCODER if "bert" in model.get("family", "") else {}
    data = {"tokenizer": str(folder / "tokenizer.json")}
    save_small(folder / "run", small_config(model={"vocab_size": 300, **model}, data=data, **sections))
    return export(folder / "run", folder / "out", head).folder


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as stored:
        return {*stored.keys()}


@pytest.mark.parametrize(("architecture", "head", "model"), EXPORTS, ids=[name for name, _, _ in EXPORTS])
def test_settings_and_tensors_are_those_that_are_read(
    tmp_path: Path, architecture: str, head: str, model: dict[str, Any]
) -> None:
    folder, listed = exported(tmp_path, head, model), LISTED[architecture]
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [architecture]
    read = [*listed.settings.split(), *listed.gguf.split()]
    assert [name for name in read if not hasattr(config, name)] == []
    layers = {f"{listed.prefix}.{n}.{name}" for n in range(LAYERS) for name in listed.layer.split()}
    first_of_modernbert = {"layers.0.attn_norm.weight"} if architecture == "ModernBertModel" else set()
    assert names_in(folder) == ({*listed.tensors.split()} | layers) - first_of_modernbert


def test_the_positions_of_llama3_stand_where_llama_cpp_looks(tmp_path: Path) -> None:
    """Which takes 8,192 where config.json does not tell them outside of `rope_parameters`."""
    scaling = {"kind": "llama3", "factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
    folder = exported(tmp_path, "tied", LLAMA | {"rotary_scaling": {**scaling, "original_positions": 32}})
    told = AutoConfig.from_pretrained(folder).to_dict()
    assert told["original_max_position_embeddings"] == 32
    assert told["rope_parameters"]["original_max_position_embeddings"] == 32


def test_the_tokenizer_lies_beside_it_and_has_no_id_beyond_the_table(tmp_path: Path) -> None:
    folder = exported(tmp_path, "tied", LLAMA)
    files = {path.name for path in folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"} < files
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert max(tokenizer.vocab.values()) < config.vocab_size
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_a_llama_with_a_bias_has_names_that_no_other_program_drops_in_silence(tmp_path: Path) -> None:
    """vLLM's ERNIE reads a head's matrix, and no bias of one: it refuses a head that is not tied, and so this one."""
    folder = exported(tmp_path, "pmi", LLAMA)
    config = AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.tie_word_embeddings) == (["Ernie4_5_MoeForCausalLM"], False)
    assert config.moe_layer_start_index > config.num_hidden_layers - 1  # no layer of experts
    weights = {f"model.layers.{n}.{name}" for n in range(LAYERS) for name in _LLAMA_LAYER.split()}
    biases = {name.replace(".weight", ".bias") for name in weights if "layernorm" not in name}
    assert names_in(folder) == weights | biases | {*_LLAMA_ENDS.split(), "lm_head.weight", "lm_head.bias"}
