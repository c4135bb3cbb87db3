"""The shape of a backbone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.config.families import DEFAULTS, ENCODERS, FIXED, NAMED_SIZES
from megahead.config.rotary import RotaryScalingConfig
from megahead.errors import ConfigError


class ModelConfig(Settings):
    """A decoder (GPT-NeoX, Pythia's architecture; Llama) or an encoder (BERT; ModernBERT): tokens to hidden states,
    no head."""

    family: Literal["gpt_neox", "llama", "bert", "modernbert"] = "gpt_neox"
    """The architecture. `llama` is also Qwen 2 and 3 and Mistral; it has other defaults (rotary positions on whole
    heads, SwiGLU, no biases), and so have `bert` (BERT's own: 512 positions, dropout 0.1, erf GELU, eps 1e-12) and
    `modernbert` (8,192 rotary positions, GeGLU, local attention, no biases)."""

    size: str | None = None
    """A named size such as `pythia-70m`, `llama-60m` or `modernbert-base`; it fills family and shape unless given."""

    is_causal: bool = True
    """Whether a token sees only itself and what precedes it in its document, and the next token is learned. An encoder
    (bert, modernbert) has false, unless it is to learn as a decoder does: its rows are then framed as ever, and
    nothing in them is masked. For the first part of a run alone: objective.schedule.causal_share."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer blocks."""

    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream (D)."""

    num_heads: int = Field(gt=0)
    """Attention heads; must divide hidden_size."""

    num_key_heads: int | None = Field(default=None, gt=0)
    """llama: heads of keys and values, fewer than num_heads, which they must divide (grouped-query attention); as many
    when left out."""

    head_dim: int | None = Field(default=None, gt=0, le=2**16)
    """llama: dimensions of a head; hidden_size / num_heads when left out."""

    qk_norm: bool = False
    """llama: norm queries and keys head by head (Qwen 3)."""

    attention_bias: Literal["none", "qkv", "all"] = "all"
    """llama: which projections of attention have a bias; `qkv`: those of queries, keys and values (Qwen 2)."""

    intermediate_size: int | None = Field(default=None, gt=0, le=2**24)
    """Width of the MLP; when left out 4 x hidden_size, with a gate (llama, modernbert) 8/3 x hidden_size, rounded up to
    a multiple of 64."""

    mlp_bias: bool = True
    """llama: whether the MLP's projections have a bias."""

    vocab_size: int = Field(gt=1, lt=2**31)
    """Token ids the tokenizer can produce (V)."""

    vocab_multiple: int = Field(default=1024, gt=0)
    """The embedding table is padded to a multiple of this many rows; padding rows are never candidates."""

    max_positions: int = Field(default=2048, gt=0)
    """Longest sequence the model is meant for, in tokens."""

    token_types: int = Field(default=0, ge=0)
    """bert: kinds of segments that have an embedding (pretraining uses the first); 0 is DistilBERT's shape."""

    rotary_pct: float = Field(default=0.25, ge=0, le=1)
    """gpt_neox: share of each head's dimensions that is rotated by position."""

    rotary_base: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies; in a modernbert of its global layers."""

    rotary_scaling: RotaryScalingConfig | None = None
    """llama: slows rotary frequencies down; none when left out."""

    global_every: int = Field(default=1, gt=0)
    """modernbert: each this many layers, from the first on, a layer sees whole documents; the others are local."""

    local_window: int = Field(default=128, ge=2, multiple_of=2)
    """modernbert: tokens around each that a local layer sees, an even number: half of them lie to each side."""

    local_rotary_base: float = Field(default=10000.0, gt=0)
    """modernbert: base of the rotary frequencies of local layers."""

    transform_bias: bool = True
    """modernbert: whether the dense layer before a vanilla head has a bias."""

    parallel_residual: bool = True
    """x + attention(norm1 x) + mlp(norm2 x) in one go (Pythia), or one after the other."""

    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu_tanh"
    """GELU by erf, or its tanh form, with which Pythia was trained; on a CPU the latter takes four times as long.
    `silu`, of the gate, makes a llama's SwiGLU."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in layer norms, to the mean square in RMS norms."""

    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what each sublayer adds to the residual stream."""

    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of attention weights."""

    init: Literal["pythia", "normal", "megatron"] = "pythia"
    """`pythia`: small-init, with wang-init for output projections; `normal`: init_std everywhere; `megatron`: so, but
    output projections 1 / sqrt(2 L) of it, L the number of layers. Llama and ModernBERT begin with `megatron`, BERT
    with `normal`."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of `init: normal` and `megatron`."""

    init_embedding_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the embedding's first values; as `init` says when left out."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        size = given.get("size")
        if size is not None and (not isinstance(size, str) or size not in NAMED_SIZES):
            raise ConfigError(
                "size",
                f"be one of {', '.join(NAMED_SIZES)}",
                got=repr(size),
                hint="or leave it out and give the shape",
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
