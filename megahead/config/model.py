"""The shape of a backbone: settings, families with their named sizes and defaults, scaled rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings, require
from megahead.errors import ConfigError
from megahead.wording import did_you_mean


def _sizes(shapes: Mapping[str, tuple[int, ...]], **shared: Any) -> dict[str, dict[str, Any]]:
    """{size: settings} from (num_layers, hidden_size, num_heads[, intermediate_size]) and `shared` settings."""
    fields = ("num_layers", "hidden_size", "num_heads", "intermediate_size")
    return {name: shared | dict(zip(fields, shape, strict=False)) for name, shape in shapes.items()}


_LLAMA3 = {"family": "llama", "num_key_heads": 8, "rotary_base": 500_000.0, "max_positions": 8192}
_QWEN = {"family": "llama", "rotary_base": 1_000_000.0, "norm_eps": 1e-6}
_QWEN2 = {**_QWEN, "max_positions": 32_768, "num_key_heads": 2, "attention_bias": "qkv"}
_QWEN3 = {**_QWEN, "max_positions": 40_960, "num_key_heads": 8, "head_dim": 128, "qk_norm": True}

_PYTHIAS = {
    "pythia-14m": (6, 128, 4),
    "pythia-31m": (6, 256, 8),
    "pythia-70m": (6, 512, 8),
    "pythia-160m": (12, 768, 12),
    "pythia-410m": (24, 1024, 16),
    "pythia-1b": (16, 2048, 8),
    "pythia-1.4b": (24, 2048, 16),
    "pythia-2.8b": (32, 2560, 32),
    "pythia-6.9b": (32, 4096, 32),
    "pythia-12b": (36, 5120, 40),
}
_LLAMAS = {"llama-15m": (6, 288, 6, 768), "llama-60m": (8, 512, 8, 1376)}
_LLAMAS |= {"llama-130m": (12, 768, 12, 2048), "llama-350m": (24, 1024, 16, 2736)}
_LLAMAS3 = {"llama-1b": (16, 2048, 32, 8192), "llama-3b": (28, 3072, 24, 8192), "llama-8b": (32, 4096, 32, 14336)}
_QWENS3 = {"qwen3-0.6b": (28, 1024, 16, 3072), "qwen3-1.7b": (28, 2048, 16, 6144)}
_QWENS3 |= {"qwen3-4b": (36, 2560, 32, 9728), "qwen3-8b": (36, 4096, 32, 12288)}
_GPT2S = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
_GEMMAS3 = {"gemma-3-270m": (18, 640, 4, 2048), "gemma-3-1b": (26, 1152, 4, 6912)}
_BERTS = {"bert-base": (12, 768, 12), "bert-small": (4, 512, 8), "bert-mini": (4, 256, 4), "bert-tiny": (2, 128, 2)}
_MODERNBERTS = {"modernbert-15m": (7, 288, 6, 576), "modernbert-base": (22, 768, 12, 1152)}
_MODERNBERTS |= {"modernbert-large": (28, 1024, 16, 2624)}
_MMBERTS = {"mmbert-small": (22, 384, 6, 1152), "mmbert-base": (22, 768, 12, 1152)}

NAMED_SIZES: dict[str, dict[str, Any]] = {
    **_sizes(_PYTHIAS),
    **_sizes(_LLAMAS, family="llama"),
    **_sizes(_LLAMAS3, **_LLAMA3),
    **_sizes({"qwen2-0.5b": (24, 896, 14, 4864)}, **_QWEN2),
    **_sizes(_QWENS3, **_QWEN3),
    **_sizes(_GPT2S, family="gpt2"),
    **_sizes(_GEMMAS3, family="gemma3", num_key_heads=1, head_dim=256, max_positions=32_768),
    **_sizes(_BERTS, family="bert", token_types=2),
    **_sizes({"distilbert-multilingual": (6, 768, 12)}, family="bert", token_types=0),
    **_sizes({"roberta-base": (12, 768, 12), "roberta-large": (24, 1024, 16)}, family="roberta"),
    **_sizes({"xlm-r-base": (12, 768, 12), "xlm-r-large": (24, 1024, 16)}, family="xlm_roberta"),
    **_sizes(_MODERNBERTS, family="modernbert"),
    **_sizes(_MMBERTS, family="modernbert", local_rotary_base=160_000.0),
}

ROBERTAS = ("roberta", "xlm_roberta")
"""One architecture: a BERT whose positions begin after the padding id."""

DISTILBERT_EPS = 1e-12
"""A DistilBERT's `norm_eps`, which its config.json does not say."""

ENCODERS = ("bert", *ROBERTAS, "modernbert")
"""Families with bidirectional attention, unless `is_causal`."""

_SEQUENTIAL_BLOCKS: dict[str, Any] = {"rotary_pct": 1.0, "parallel_residual": False}
_NO_ROTATION: dict[str, Any] = {"rotary_pct": 0.0, "parallel_residual": False}
_NO_BIASES: dict[str, Any] = {"attention_bias": "none", "mlp_bias": False}

_BERT: dict[str, Any] = {
    "is_causal": False,
    "max_positions": 512,
    "token_types": 2,
    **_NO_ROTATION,
    "activation": "gelu",
    "norm_eps": 1e-12,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init": "normal",
}
_ROBERTA = {**_BERT, "token_types": 1, "position_offset": 2, "norm_eps": 1e-5}

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "llama": {**_SEQUENTIAL_BLOCKS, **_NO_BIASES, "activation": "silu", "init": "megatron"},
    "gpt2": {
        **_NO_ROTATION,
        "max_positions": 1024,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init": "megatron",
    },
    "gemma3": {
        **_SEQUENTIAL_BLOCKS,
        **_NO_BIASES,
        "qk_norm": True,
        "max_positions": 32_768,
        "rotary_base": 1_000_000.0,
        "global_every": 6,
        "local_window": 512,
        "norm_eps": 1e-6,
        "init": "megatron",
    },
    "bert": _BERT,
    **dict.fromkeys(ROBERTAS, _ROBERTA),
    "modernbert": {
        "is_causal": False,
        "max_positions": 8192,
        **_SEQUENTIAL_BLOCKS,
        **_NO_BIASES,
        "rotary_base": 160_000.0,
        "global_every": 3,
        "activation": "gelu",
        "transform_bias": False,
        "init": "megatron",
    },
}
"""{family: defaults that differ from GPT-NeoX's}"""

_STANDARD_SCORES = {"query_pre_attn_scalar": None}
_STANDARD_HEADS = {
    "num_key_heads": None,
    "head_dim": None,
    "qk_norm": False,
    "rotary_scaling": None,
    **_STANDARD_SCORES,
}
_ALL_BIASES = {"attention_bias": "all", "mlp_bias": True}
_NO_LOCAL_LAYERS = {"global_every": 1, "local_window": 128, "local_rotary_base": 10000.0, "transform_bias": True}
_NO_LEARNED_POSITIONS = {"token_types": 0, "position_offset": 0}
_BLOCKS_WITHOUT_ROTATION = {**_NO_ROTATION, **_STANDARD_HEADS, **_ALL_BIASES, **_NO_LOCAL_LAYERS}
_ROBERTA_FIXED = {"token_types": 1, "activation": "gelu", **_BLOCKS_WITHOUT_ROTATION}

FAMILY_FIXED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"is_causal": True, **_NO_LEARNED_POSITIONS, **_STANDARD_HEADS, **_ALL_BIASES, **_NO_LOCAL_LAYERS},
    "llama": {"is_causal": True, **_NO_LEARNED_POSITIONS, **_SEQUENTIAL_BLOCKS, **_STANDARD_SCORES, **_NO_LOCAL_LAYERS},
    "gpt2": {"is_causal": True, "token_types": 0, "position_offset": 0, **_BLOCKS_WITHOUT_ROTATION},
    "gemma3": {
        "is_causal": True,
        **_NO_LEARNED_POSITIONS,
        **_SEQUENTIAL_BLOCKS,
        **_NO_BIASES,
        "qk_norm": True,
        "transform_bias": True,
    },
    "bert": {"position_offset": 0, **_BLOCKS_WITHOUT_ROTATION},
    **dict.fromkeys(ROBERTAS, _ROBERTA_FIXED),
    "modernbert": {**_NO_LEARNED_POSITIONS, **_SEQUENTIAL_BLOCKS, **_NO_BIASES, **_STANDARD_HEADS},
}
"""{family: required values of settings that only other families support}"""


class RotaryScalingConfig(Settings):
    """Lowers rotary frequencies, for longer rows than in the original training."""

    kind: Literal["linear", "llama3"]
    """`linear`: all frequencies; `llama3`: those with wavelengths of about original_positions or longer (Llama 3.1)."""

    factor: float = Field(ge=1)
    """Frequencies are divided by this."""

    low_frequency_factor: float = Field(default=1.0, gt=0)
    """llama3: frequencies with fewer turns in original_positions are divided by `factor`."""

    high_frequency_factor: float = Field(default=4.0, gt=0)
    """llama3: frequencies with more turns in original_positions are kept."""

    original_positions: int = Field(default=8192, gt=0)
    """llama3: longest rows of the original training, in tokens."""

    @model_validator(mode="after")
    def _check_consistency(self) -> RotaryScalingConfig:
        llama3_fields = ("low_frequency_factor", "high_frequency_factor", "original_positions")
        for field, value in self.changed(*llama3_fields).items() if self.kind == "linear" else ():
            raise ConfigError(field, "be left out of `linear` scaling", got=value)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        require(high > low, "high_frequency_factor", f"be above low_frequency_factor ({low:g})", got=f"{high:g}")
        return self


class ModelConfig(Settings):
    """A decoder (GPT-NeoX, Llama, GPT-2, Gemma 3) or encoder (BERT, RoBERTa, ModernBERT): tokens to hidden states."""

    family: Literal["gpt_neox", "llama", "gpt2", "gemma3", "bert", "roberta", "xlm_roberta", "modernbert"] = "gpt_neox"
    """The architecture, with its own defaults (docs/models.md). `llama` includes Qwen 2 and 3 and Mistral, `modernbert`
    mmBERT; `roberta` and `xlm_roberta` are one."""

    size: str | None = None
    """A named size such as `pythia-70m` or `modernbert-base`; fills family and shape unless given."""

    is_causal: bool = True
    """Causal attention, and next tokens as targets; an encoder then reads unmasked [CLS] text [SEP]. For a run's first
    part: objective.schedule.causal_share."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer blocks."""

    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream (D)."""

    num_heads: int = Field(gt=0)
    """Attention heads; must divide hidden_size."""

    num_key_heads: int | None = Field(default=None, gt=0)
    """llama, gemma3: heads of keys and values, a divisor of num_heads (grouped queries); num_heads by default."""

    head_dim: int | None = Field(default=None, gt=0, le=2**16)
    """llama, gemma3: dimensions of a head; hidden_size / num_heads by default."""

    qk_norm: bool = False
    """llama: normalises queries and keys per head (Qwen 3); always so in a gemma3."""

    query_pre_attn_scalar: int | None = Field(default=None, gt=0)
    """gemma3: attention's scores are divided by its square root; the dimensions of a head by default."""

    attention_bias: Literal["none", "qkv", "all"] = "all"
    """llama: attention projections with a bias; `qkv`: queries, keys and values (Qwen 2)."""

    intermediate_size: int | None = Field(default=None, gt=0, le=2**24)
    """Width of the MLP; by default 4 x hidden_size, with a gate (llama, gemma3, modernbert) 8/3 x hidden_size
    rounded up to a multiple of 64."""

    mlp_bias: bool = True
    """llama: whether MLP projections have a bias."""

    vocab_size: int = Field(gt=1, lt=2**31)
    """Token ids of the tokenizer (V); by default those of data.train, which must exist then."""

    vocab_multiple: int = Field(default=1024, gt=0)
    """The embedding is padded to a multiple of this many rows; padding rows are never candidates."""

    max_positions: int = Field(default=2048, gt=0)
    """Longest sequence in tokens."""

    token_types: int = Field(default=0, ge=0)
    """bert: segment types with an embedding (pretraining uses the first); 0 is DistilBERT's shape."""

    position_offset: int = Field(default=0, ge=0)
    """roberta, xlm_roberta: the padding id + 1; the first token takes this row of the position embedding."""

    rotary_pct: float = Field(default=0.25, ge=0, le=1)
    """gpt_neox: share of each head's dimensions with rotary positions."""

    rotary_base: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies; in a modernbert or gemma3 that of global layers."""

    rotary_scaling: RotaryScalingConfig | None = None
    """llama, and global layers of a gemma3: scales rotary frequencies."""

    global_every: int = Field(default=1, gt=0)
    """modernbert, gemma3: one layer of this many is global, the first of a modernbert's, the last of a gemma3's; the
    others are local."""

    local_window: int = Field(default=128, ge=2, multiple_of=2)
    """Window of local attention in tokens: in a modernbert half of them on each side, in a gemma3 the token itself and
    those before it."""

    local_rotary_base: float = Field(default=10000.0, gt=0)
    """modernbert, gemma3: base of the rotary frequencies of local layers."""

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
    """`pythia`: small-init, and wang-init for output projections; `normal`: init_std; `megatron`: init_std, divided by
    sqrt(2 L) for output projections of L layers."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation under `normal` and `megatron`."""

    init_embedding_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the embedding's initial values; by default that of `init`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        size = settings.get("size")
        if size is not None and not (isinstance(size, str) and size in NAMED_SIZES):
            hint = did_you_mean(str(size), NAMED_SIZES) or "or leave it out and give the shape"
            raise ConfigError("size", f"be one of {', '.join(NAMED_SIZES)}", got=repr(size), hint=hint)
        settings = {**({} if size is None else NAMED_SIZES[size]), **settings}
        family = settings.get("family")
        return {**(FAMILY_DEFAULTS.get(family, {}) if isinstance(family, str) else {}), **settings}

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        hidden, heads, key_heads, rotary_dims = self.hidden_size, self.num_heads, self.key_heads(), self.rotary_dims()
        require(hidden % heads == 0, "hidden_size", f"be a multiple of num_heads ({heads})", got=hidden)
        require(heads % key_heads == 0, "num_key_heads", f"divide num_heads ({heads})", got=key_heads)
        rule = f"rotate an even number of each head's {self.head_size()} dimensions"
        require(rotary_dims % 2 == 0, "rotary_pct", rule, got=f"{self.rotary_pct} ({rotary_dims} dimensions)")
        return self

    @model_validator(mode="after")
    def _check_family(self) -> ModelConfig:
        for field, required in FAMILY_FIXED[self.family].items():
            value = getattr(self, field)
            require(value == required, field, f"be left out of a {self.family}", got=value)
        if self.family != "llama":
            rule = f"be gelu or gelu_tanh in a {self.family}"
            require(self.activation != "silu", "activation", rule, got="silu")
        if self.family in ROBERTAS:
            rule = f"be the padding id + 1 in a {self.family}"
            require(self.position_offset, "position_offset", rule, got=0)
        return self

    @model_validator(mode="after")
    def _check_llama_variant(self) -> ModelConfig:
        """Refuses combinations of biases and norms that no class of transformers has."""
        if self.family == "llama":
            is_qwen2 = self.attention_bias == "qkv"
            conflict = "attention_bias: qkv" if is_qwen2 else "mlp_bias: true"
            supported = not (self.qk_norm and (is_qwen2 or self.mlp_bias))
            rule = f"be false with {conflict}, which no published model has together"
            require(supported, "qk_norm", rule, got="true")
            rule = "be false with attention_bias: qkv, as in Qwen 2"
            require(not (self.mlp_bias and is_qwen2), "mlp_bias", rule, got="true")
        return self

    def non_default_settings(self) -> dict[str, Any]:
        """The family, and all settings that differ from its defaults, for a config file."""
        defaults = self._family_defaults()
        values = self.model_dump(mode="json", exclude={"size"})
        return {name: value for name, value in values.items() if name == "family" or value != defaults[name]}

    def has_default(self, name: str) -> bool:
        """Whether the setting has the value that its size and family give it where it is left out."""
        return bool(getattr(self, name) == (self._family_defaults() | NAMED_SIZES.get(self.size or "", {}))[name])

    def _family_defaults(self) -> dict[str, Any]:
        return {name: field.default for name, field in type(self).model_fields.items()} | FAMILY_DEFAULTS[self.family]

    def is_encoder(self) -> bool:
        """Whether the family reads rows with [CLS] and [SEP], and is exported as an encoder."""
        return self.family in ENCODERS

    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def is_distilbert(self) -> bool:
        """Whether it is a BERT without token types, which is exported as a DistilBERT."""
        return self.family == "bert" and not self.token_types

    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_key_heads or self.num_heads

    def query_scalar(self) -> int:
        """The square of the divisor of attention's scores."""
        return self.query_pre_attn_scalar or self.head_size()

    def has_gated_mlp(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return self.family in ("llama", "gemma3", "modernbert")

    def has_norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.family not in ("llama", "gemma3", "modernbert")

    def transformers_can_bias_head(self) -> bool:
        """Whether transformers has a class for this model that allows a bias in the head."""
        return self.is_encoder() or not self.qk_norm

    def has_rms_norm(self) -> bool:
        """Whether norms are RMS norms, which do not subtract the mean."""
        return self.family in ("llama", "gemma3")

    def has_zero_centered_norms(self) -> bool:
        """Whether norms multiply by 1 + weight."""
        return self.family == "gemma3"

    def norms_per_block(self) -> int:
        """Number of norms of a block, those of each head not included."""
        return 4 if self.family == "gemma3" else 2

    def has_learned_positions(self) -> bool:
        """Whether there is a position embedding."""
        return self.family in ("gpt2", "bert", *ROBERTAS)

    def position_rows(self) -> int:
        """Rows of the position embedding, of which tokens use the last max_positions."""
        return self.position_offset + self.max_positions

    def padding_token(self) -> int | None:
        """The padding id, which has no position, of a model whose positions begin after it; else None."""
        return self.position_offset - 1 if self.position_offset else None

    def is_local(self, layer: int) -> bool:
        """Whether the layer has local attention."""
        first_global = self.global_every - 1 if self.family == "gemma3" else 0
        return layer % self.global_every != first_global

    def window_radius(self) -> int:
        """How many other tokens a token of a local layer attends to on each side or, if causal, before it."""
        return self.local_window - 1 if self.family == "gemma3" else self.local_window // 2

    def local_layers(self) -> int:
        """Number of layers with local attention."""
        return sum(self.is_local(layer) for layer in range(self.num_layers))

    def rotary_dims(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_size() * self.rotary_pct)

    def mlp_size(self) -> int:
        """Width of the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64 if self.has_gated_mlp() else 4 * self.hidden_size

    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
