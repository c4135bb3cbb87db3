"""The rename table covers every parameter, and reads the same in both directions."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megahead.errors import FieldError
from megahead.hf.decoders import GPT_NEOX, LLAMA
from megahead.hf.encoders import MODERNBERT
from megahead.hf.families import ParameterNames
from megahead.objectives.pretraining import weight_shapes
from support.small_checkpoint import small_config


def test_the_table_is_a_bijection_between_our_parameters_and_those_of_transformers() -> None:
    ours = list(weight_shapes(small_config(objective={"name": "vanilla"})))
    with torch.device("meta"):
        config = GPTNeoXConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=3, vocab_size=61)
        theirs = {name.replace("lm_head", "embed_out") for name, _ in GPTNeoXForCausalLM(config).named_parameters()}
    renamed = [GPT_NEOX.names.to_hf(name) for name in ours]
    assert set(renamed) == theirs
    assert [GPT_NEOX.names.from_hf(name) for name in renamed if name] == [(name,) for name in ours]


@pytest.mark.parametrize("bias", ["none", "all"])
def test_so_is_the_table_of_llama(bias: str) -> None:
    model = {"family": "llama", "qk_norm": True, "attention_bias": bias}
    ours = list(weight_shapes(small_config(model=model, objective={"name": "vanilla"})))
    with torch.device("meta"):
        shape = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "vocab_size": 61}
        their_model = Qwen3ForCausalLM(Qwen3Config(**shape, attention_bias=bias == "all"))
    renamed = [LLAMA.names.to_hf(name) for name in ours]
    assert set(renamed) == {name for name, _ in their_model.named_parameters()}
    assert [LLAMA.parameter_names(name) for name in renamed if name] == [(name,) for name in ours]


def test_in_the_table_of_modernbert_some_of_theirs_hold_several_of_ours() -> None:
    model = {"family": "modernbert", "num_layers": 3, "transform_bias": True}
    masking = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
    ours = list(weight_shapes(small_config(model=model, masking=masking, objective={"name": "vanilla"})))
    with torch.device("meta"):
        shape = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3, "vocab_size": 61}
        config = ModernBertConfig(**shape, pad_token_id=0, classifier_bias=True, tie_word_embeddings=False)
        theirs = [name for name, _ in ModernBertForMaskedLM(config).named_parameters()]
    table = MODERNBERT.names
    assert {table.to_hf(name) for name in ours} == set(theirs)
    assert sorted(name for their_name in theirs for name in table.from_hf(their_name)) == sorted(ours)
    attention, mlp = "backbone.blocks.2.attention", "backbone.blocks.2.mlp"
    assert MODERNBERT.parameter_names("layers.2.attn.Wqkv.weight") == tuple(
        f"{attention}.{part}.weight" for part in ("query", "key", "value")
    )
    assert MODERNBERT.parameter_names("layers.2.mlp.Wi.weight") == (f"{mlp}.gate.weight", f"{mlp}.up.weight")


def test_layer_numbers_of_any_size_survive() -> None:
    assert GPT_NEOX.names.to_hf("backbone.blocks.31.mlp.up.bias") == "gpt_neox.layers.31.mlp.dense_h_to_4h.bias"


def test_names_of_a_lone_backbone_and_of_newer_versions_are_known() -> None:
    assert GPT_NEOX.parameter_names("layers.7.attention.dense.weight") == ("backbone.blocks.7.attention.output.weight",)
    assert GPT_NEOX.parameter_names("lm_head.weight") == ("head.weight",)


@pytest.mark.parametrize("leaf", ["attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"])
def test_buffers_of_old_versions_are_no_parameters(leaf: str) -> None:
    assert GPT_NEOX.parameter_names(f"gpt_neox.layers.0.{leaf}") == ()


def test_an_unknown_name_is_refused_rather_than_skipped() -> None:
    with pytest.raises(FieldError, match=r"transformer\.wte\.weight"):
        GPT_NEOX.parameter_names("transformer.wte.weight")


def test_a_table_that_cannot_be_reversed_is_refused() -> None:
    with pytest.raises(ValueError, match="the same Hugging Face name"):
        ParameterNames({"a": "x", ("b", "c"): "x"})
