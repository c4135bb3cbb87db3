"""The shape of a backbone: its settings, its families with their named sizes and defaults, scaled rotary embeddings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError

# Families of models: named sizes, where a family's defaults differ from Pythia's, and settings that it cannot have.


def _size(num_layers: int, hidden_size: int, num_heads: int, **settings: Any) -> dict[str, Any]:
    return {**settings, "num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}


def _bert(num_layers: int, hidden_size: int, num_heads: int, token_types: int = 2) -> dict[str, Any]:
    return _size(num_layers, hidden_size, num_heads, family="bert", token_types=token_types)


def _llama(num_layers: int, hidden_size: int, num_heads: int, mlp: int, **settings: Any) -> dict[str, Any]:
    return _size(num_layers, hidden_size, num_heads, family="llama", intermediate_size=mlp, **settings)


def _llama3(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_key_heads": 8, "rotary_base": 500_000.0, "max_positions": 8192}
    return _llama(num_layers, hidden_size, num_heads, mlp, **settings)


def _qwen(max_positions: int) -> dict[str, Any]:
    return {"rotary_base": 1_000_000.0, "max_positions": max_positions, "norm_eps": 1e-6}


def _qwen3(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    heads: dict[str, Any] = {"num_key_heads": 8, "head_dim": 128, "qk_norm": True}
    return _llama(num_layers, hidden_size, num_heads, mlp, **heads, **_qwen(40_960))


def _modernbert(num_layers: int, hidden_size: int, num_heads: int, mlp: int) -> dict[str, Any]:
    return _size(num_layers, hidden_size, num_heads, family="modernbert", intermediate_size=mlp)


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
    "bert-base": _bert(12, 768, 12),
    "bert-small": _bert(4, 512, 8),
    "bert-mini": _bert(4, 256, 4),
    "bert-tiny": _bert(2, 128, 2),
    "distilbert-multilingual": _bert(6, 768, 12, token_types=0),
    "modernbert-15m": _modernbert(7, 288, 6, 576),
    "modernbert-base": _modernbert(22, 768, 12, 1152),
    "modernbert-large": _modernbert(28, 1024, 16, 2624),
}

ENCODERS = ("bert", "modernbert")
"""Families whose tokens see both sides, unless `is_causal`."""

_SEQUENTIAL: dict[str, Any] = {"rotary_pct": 1.0, "parallel_residual": False}
_NO_BIASES: dict[str, Any] = {"attention_bias": "none", "mlp_bias": False}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "llama": {**_SEQUENTIAL, **_NO_BIASES, "activation": "silu", "init": "megatron"},
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
        **_SEQUENTIAL,
        **_NO_BIASES,
        "rotary_base": 160_000.0,
        "global_every": 3,
        "activation": "gelu",
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
    "llama": {"is_causal": True, "token_types": 0, **_SEQUENTIAL, **_OF_MODERNBERT_ALONE},
    "bert": {**_SEQUENTIAL, "rotary_pct": 0.0, **_ONE_KIND_OF_HEADS, **_ALL_BIASES, **_OF_MODERNBERT_ALONE},
    "modernbert": {"token_types": 0, **_SEQUENTIAL, **_NO_BIASES, **_ONE_KIND_OF_HEADS},
}
"""Settings that belong to other families, and the values that they must keep in this one."""


class RotaryScalingConfig(Settings):
    """Slows rotary frequencies down, for longer rows than in the first training."""

    kind: Literal["linear", "llama3"]
    """`linear`: all frequencies; `llama3`: those with wavelengths of about original_positions or longer (Llama 3.1)."""

    factor: float = Field(ge=1)
    """Frequencies are divided by this."""

    low_frequency_factor: float = Field(default=1.0, gt=0)
    """llama3: frequencies with fewer turns in original_positions are divided by `factor`."""

    high_frequency_factor: float = Field(default=4.0, gt=0)
    """llama3: frequencies with more turns in original_positions are kept."""

    original_positions: int = Field(default=8192, gt=0)
    """llama3: longest rows of the first training, in tokens."""

    @model_validator(mode="after")
    def _makes_sense(self) -> RotaryScalingConfig:
        given = self.model_fields_set - {"kind", "factor"}
        foreign = [field for field in given if getattr(self, field) != type(self).model_fields[field].default]
        if self.kind == "linear" and foreign:
            raise ConfigError(foreign[0], "be left out of `linear` scaling", got=getattr(self, foreign[0]))
        if self.low_frequency_factor >= self.high_frequency_factor:
            rule = f"be above low_frequency_factor ({self.low_frequency_factor:g})"
            raise ConfigError("high_frequency_factor", rule, got=f"{self.high_frequency_factor:g}")
        return self


class ModelConfig(Settings):
    """A decoder (GPT-NeoX, Llama) or an encoder (BERT, ModernBERT): tokens to hidden states, no head."""

    family: Literal["gpt_neox", "llama", "bert", "modernbert"] = "gpt_neox"
    """The architecture, with its own defaults. `llama` includes Qwen 2 and 3 and Mistral (rotary positions on whole
    heads, SwiGLU, no biases); `bert` has 512 positions, dropout 0.1, erf GELU; `modernbert` 8,192 rotary positions,
    GeGLU, local attention, no biases."""

    size: str | None = None
    """A named size such as `pythia-70m` or `modernbert-base`; fills family and shape unless given."""

    is_causal: bool = True
    """Causal attention, and next tokens as targets. False in an encoder (bert, modernbert); true trains it as a
    decoder, on framed rows without masks. For the first part of a run see objective.schedule.causal_share."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer blocks."""

    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream (D)."""

    num_heads: int = Field(gt=0)
    """Attention heads; must divide hidden_size."""

    num_key_heads: int | None = Field(default=None, gt=0)
    """llama: heads of keys and values, a divisor of num_heads (grouped-query attention); num_heads by default."""

    head_dim: int | None = Field(default=None, gt=0, le=2**16)
    """llama: dimensions of a head; hidden_size / num_heads by default."""

    qk_norm: bool = False
    """llama: normalises queries and keys per head (Qwen 3)."""

    attention_bias: Literal["none", "qkv", "all"] = "all"
    """llama: attention projections with a bias; `qkv`: queries, keys and values (Qwen 2)."""

    intermediate_size: int | None = Field(default=None, gt=0, le=2**24)
    """Width of the MLP; by default 4 x hidden_size, with a gate (llama, modernbert) 8/3 x hidden_size rounded up to
    a multiple of 64."""

    mlp_bias: bool = True
    """llama: whether MLP projections have a bias."""

    vocab_size: int = Field(gt=1, lt=2**31)
    """Token ids of the tokenizer (V)."""

    vocab_multiple: int = Field(default=1024, gt=0)
    """The embedding is padded to a multiple of this many rows; padding rows are never candidates."""

    max_positions: int = Field(default=2048, gt=0)
    """Longest sequence in tokens."""

    token_types: int = Field(default=0, ge=0)
    """bert: segment types with an embedding (pretraining uses the first); 0 is DistilBERT's shape."""

    rotary_pct: float = Field(default=0.25, ge=0, le=1)
    """gpt_neox: share of each head's dimensions with rotary positions."""

    rotary_base: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies; in a modernbert that of global layers."""

    rotary_scaling: RotaryScalingConfig | None = None
    """llama: scales rotary frequencies; none by default."""

    global_every: int = Field(default=1, gt=0)
    """modernbert: one layer of this many, from the first on, is global; the others are local."""

    local_window: int = Field(default=128, ge=2, multiple_of=2)
    """modernbert: window of local attention in tokens, half of them on each side."""

    local_rotary_base: float = Field(default=10000.0, gt=0)
    """modernbert: base of the rotary frequencies of local layers."""

    transform_bias: bool = True
    """modernbert: whether the dense layer before a vanilla head has a bias."""

    parallel_residual: bool = True
    """x + attention(norm1 x) + mlp(norm2 x) (Pythia) instead of one after the other."""

    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu_tanh"
    """`gelu` by erf; `gelu_tanh`, Pythia's, four times as slow on a CPU; `silu` for a llama's SwiGLU."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in layer norms, to the mean square in RMS norms."""

    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of each sublayer's output."""

    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of attention weights."""

    init: Literal["pythia", "normal", "megatron"] = "pythia"
    """`pythia`: small-init, and wang-init for output projections; `normal`: init_std; `megatron`: init_std, divided
    by sqrt(2 L) for output projections of L layers (llama, modernbert). BERT has `normal`."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation under `normal` and `megatron`."""

    init_embedding_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the embedding's initial values; by default that of `init`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        size = given.get("size")
        if size is not None and (not isinstance(size, str) or size not in NAMED_SIZES):
            raise ConfigError(
                "size", f"be one of {', '.join(NAMED_SIZES)}", got=repr(size), hint="or leave it out and give the shape"
            )
        filled = {**({} if size is None else NAMED_SIZES[size]), **given}
        family = filled.get("family")
        return {**(DEFAULTS.get(family, {}) if isinstance(family, str) else {}), **filled}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ConfigError("hidden_size", f"be a multiple of num_heads ({self.num_heads})", got=self.hidden_size)
        if self.num_heads % self.key_heads():
            raise ConfigError("num_key_heads", f"divide num_heads ({self.num_heads})", got=self.key_heads())
        if self.rotary_dims() % 2:
            raise ConfigError(
                "rotary_pct",
                f"rotate an even number of each head's {self.head_size()} dimensions",
                got=f"{self.rotary_pct} ({self.rotary_dims()} dimensions)",
            )
        return self

    @model_validator(mode="after")
    def _is_of_its_family(self) -> ModelConfig:
        for field, value in FIXED[self.family].items():
            if getattr(self, field) != value:
                raise ConfigError(field, f"be left out of a {self.family}", got=getattr(self, field))
        if self.activation == "silu" and self.family != "llama":
            raise ConfigError("activation", f"be gelu or gelu_tanh in a {self.family}", got="silu")
        return self

    @model_validator(mode="after")
    def _is_a_known_kind_of_llama(self) -> ModelConfig:
        """Others would train, but nobody else could read them."""
        if self.family == "llama" and self.qk_norm and (self.attention_bias == "qkv" or self.mlp_bias):
            has = "attention_bias: qkv" if self.attention_bias == "qkv" else "mlp_bias: true"
            raise ConfigError("qk_norm", f"be false with {has}, which no published model has together", got="true")
        if self.family == "llama" and self.mlp_bias and self.attention_bias == "qkv":
            raise ConfigError("mlp_bias", "be false with attention_bias: qkv, as in Qwen 2", got="true")
        return self

    def is_encoder(self) -> bool:
        """Whether it is of a family that reads framed rows and is exported as an encoder."""
        return self.family in ENCODERS

    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_heads or self.num_heads

    def has_gated_mlp(self) -> bool:
        """Whether the MLP has a third matrix, of the gate."""
        return self.family in ("llama", "modernbert")

    def has_norm_bias(self) -> bool:
        """Whether norms have a bias beside their weight."""
        return self.family in ("gpt_neox", "bert")

    def has_rms_norm(self) -> bool:
        """Whether norms are RMS norms, which take no mean off."""
        return self.family == "llama"

    def has_learned_positions(self) -> bool:
        """Whether there is a vector for each position."""
        return self.family == "bert"

    def is_local(self, layer: int) -> bool:
        """Whether tokens of this layer see what is near them alone."""
        return layer % self.global_every != 0

    def local_layers(self) -> int:
        """How many layers are local."""
        return sum(self.is_local(layer) for layer in range(self.num_layers))

    def rotary_dims(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_size() * self.rotary_pct)

    def mlp_size(self) -> int:
        """Width of the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64 if self.has_gated_mlp() else 4 * self.hidden_size

    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
