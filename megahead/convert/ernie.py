"""A Llama whose head has a bias: ERNIE 4.5 of Hugging Face without its experts.

No class that Hugging Face calls Llama or Qwen has a bias in its head, and behind an RMS norm none can be folded in: its
outputs lie on an ellipsoid around 0, on which no linear form is constant. `Ernie4_5_MoeForCausalLM` has all bricks of a
Llama, and biases everywhere with `use_bias`, the head included; those that a Llama lacks are stored as zeros. Its
rotary positions turn neighbours, 2i and 2i + 1, where Llama's turn i and i + d/2: rows of queries and keys change
places. The function stays the same, number by number. It has no norms of queries and keys.

d dimensions of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megahead.config import ModelConfig
from megahead.convert.llama import llama_config

HEAD_BIAS = "lm_head.bias"


def ernie_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`."""
    shape = llama_config(model)
    for foreign in ("attention_bias", "mlp_bias", "attention_dropout", "use_sliding_window"):
        shape.pop(foreign, None)
    no_experts = {
        "moe_layer_start_index": model.num_layers,
        "moe_layer_end_index": model.num_layers,
        "moe_num_experts": 1,
        "moe_num_shared_experts": 0,
        "moe_k": 1,
        "moe_intermediate_size": model.mlp_size(),
    }
    return {**shape, **no_experts, "model_type": "ernie4_5_moe", "use_bias": True}


def as_stored(model: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Our parameter `name` as ERNIE stores it: rows of queries and keys in the order of its rotary positions."""
    if not name.rpartition(".")[0].endswith(("attention.query", "attention.key")):
        return tensor
    pairs: Tensor = tensor.unflatten(0, (-1, 2, model.head_size() // 2)).transpose(1, 2)  # heads, pairs, halves
    return pairs.flatten(0, 2)


def zero_biases(model: ModelConfig) -> dict[str, int]:
    """The biases that `model` lacks, by their names in ERNIE, and their sizes."""
    keys = model.key_heads() * model.head_size()
    lacking = {"self_attn.o_proj": model.hidden_size} if model.attention_bias != "all" else {}
    if model.attention_bias == "none":
        lacking |= {"self_attn.q_proj": model.num_heads * model.head_size()}
        lacking |= {"self_attn.k_proj": keys, "self_attn.v_proj": keys}
    if not model.mlp_bias:
        lacking |= {"mlp.gate_proj": model.mlp_size(), "mlp.up_proj": model.mlp_size()}
        lacking |= {"mlp.down_proj": model.hidden_size}
    layers = range(model.num_layers)
    return {f"model.layers.{layer}.{part}.bias": size for layer in layers for part, size in lacking.items()}
