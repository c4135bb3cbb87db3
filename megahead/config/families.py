"""Families of models: named sizes, where a family's defaults differ from Pythia's, and settings that it cannot have."""

from __future__ import annotations

from typing import Any


def _size(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}


def _encoder(num_layers: int, hidden_size: int, num_heads: int, token_types: int = 2) -> dict[str, Any]:
    return {"family": "bert", **_size(num_layers, hidden_size, num_heads), "token_types": token_types}


def _llama(num_layers: int, hidden_size: int, num_heads: int, mlp: int, **settings: Any) -> dict[str, Any]:
    return {"family": "llama", **_size(num_layers, hidden_size, num_heads), "intermediate_size": mlp, **settings}


def _llama3(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    shape = _llama(num_layers, hidden_size, num_heads, mlp, num_key_heads=8)
    return shape | {"rotary_base": 500_000.0, "max_positions": 8192}


def _qwen(max_positions: int) -> dict[str, Any]:
    return {"rotary_base": 1_000_000.0, "max_positions": max_positions, "norm_eps": 1e-6}


def _qwen3(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    heads: dict[str, Any] = {"num_key_heads": 8, "head_dim": 128, "qk_norm": True}
    return _llama(num_layers, hidden_size, num_heads, mlp, **heads, **_qwen(40_960))


def _modernbert(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    return {"family": "modernbert", **_size(num_layers, hidden_size, num_heads), "intermediate_size": mlp}


NAMED_SIZES: dict[str, dict[str, Any]] = {
    "pythia-14m": _size(6, 128, 4),
    "pythia-31m": _size(6, 256, 8),
    "pythia-70m": _size(6, 512, 8),
    "pythia-160m": _size(12, 768, 12),
    "pythia-410m": _size(24, 1024, 16),
    "pythia-1b": _size(16, 2048, 8),
    "pythia-1.4b": _size(24, 2048, 16),
    "pythia-2.8b": _size(32, 2560, 32),
    "pythia-6.9b": _size(32, 4096, 32),
    "pythia-12b": _size(36, 5120, 40),
    "llama-15m": _llama(6, 288, 6, 768),
    "llama-60m": _llama(8, 512, 8, 1376),
    "llama-130m": _llama(12, 768, 12, 2048),
    "llama-350m": _llama(24, 1024, 16, 2736),
    "llama-1b": _llama3(16, 2048, 32, 8192),
    "llama-3b": _llama3(28, 3072, 24, 8192),
    "llama-8b": _llama3(32, 4096, 32, 14336),
    "qwen2-0.5b": _llama(24, 896, 14, 4864, num_key_heads=2, attention_bias="qkv", **_qwen(32_768)),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "bert-base": _encoder(12, 768, 12),
    "bert-small": _encoder(4, 512, 8),
    "bert-mini": _encoder(4, 256, 4),
    "bert-tiny": _encoder(2, 128, 2),
    "distilbert-multilingual": _encoder(6, 768, 12, token_types=0),
    "modernbert-15m": _modernbert(7, 288, 6, 576),
    "modernbert-base": _modernbert(22, 768, 12, 1152),
    "modernbert-large": _modernbert(28, 1024, 16, 2624),
}

ENCODERS = ("bert", "modernbert")
"""Families whose tokens see both sides, unless `is_causal`."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "llama": {
        "rotary_pct": 1.0,
        "parallel_residual": False,
        "activation": "silu",
        "attention_bias": "none",
        "mlp_bias": False,
        "init": "megatron",
    },
    "bert": {
        "is_causal": False,
        "max_positions": 512,
        "token_types": 2,
        "rotary_pct": 0.0,
        "parallel_residual": False,
        "activation": "gelu",
        "norm_eps": 1e-12,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init": "normal",
    },
    "modernbert": {
        "is_causal": False,
        "max_positions": 8192,
        "rotary_pct": 1.0,
        "rotary_base": 160_000.0,
        "global_every": 3,
        "parallel_residual": False,
        "activation": "gelu",
        "attention_bias": "none",
        "mlp_bias": False,
        "transform_bias": False,
        "init": "megatron",
    },
}
"""Defaults of a family that differ from Pythia's."""

_ONE_KIND_OF_HEADS = {"num_key_heads": None, "head_dim": None, "qk_norm": False, "rotary_scaling": None}
_ALL_BIASES = {"attention_bias": "all", "mlp_bias": True}
_OF_MODERNBERT_ALONE = {"global_every": 1, "local_window": 128, "local_rotary_base": 10000.0, "transform_bias": True}

FIXED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"is_causal": True, "token_types": 0, **_ONE_KIND_OF_HEADS, **_ALL_BIASES, **_OF_MODERNBERT_ALONE},
    "llama": {
        "is_causal": True,
        "token_types": 0,
        "rotary_pct": 1.0,
        "parallel_residual": False,
        **_OF_MODERNBERT_ALONE,
    },
    "bert": {
        "rotary_pct": 0.0,
        "parallel_residual": False,
        **_ONE_KIND_OF_HEADS,
        **_ALL_BIASES,
        **_OF_MODERNBERT_ALONE,
    },
    "modernbert": {
        "token_types": 0,
        "rotary_pct": 1.0,
        "parallel_residual": False,
        "attention_bias": "none",
        "mlp_bias": False,
        **_ONE_KIND_OF_HEADS,
    },
}
"""Settings that belong to other families, and the values that they must keep in this one."""
