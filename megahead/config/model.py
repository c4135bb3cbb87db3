"""The shape of a backbone, and named sizes: of the Pythia suite, and of BERT."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError


def _size(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}


def _encoder(num_layers: int, hidden_size: int, num_heads: int, token_types: int = 2) -> dict[str, Any]:
    return {"family": "bert", **_size(num_layers, hidden_size, num_heads), "token_types": token_types}


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
    "bert-base": _encoder(12, 768, 12),
    "bert-small": _encoder(4, 512, 8),
    "bert-mini": _encoder(4, 256, 4),
    "bert-tiny": _encoder(2, 128, 2),
    "distilbert-multilingual": _encoder(6, 768, 12, token_types=0),
}

_BERT_DEFAULTS: dict[str, Any] = {
    "max_positions": 512,
    "token_types": 2,
    "rotary_pct": 0.0,
    "parallel_residual": False,
    "activation": "gelu",
    "norm_eps": 1e-12,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init": "normal",
}
"""What BERT has otherwise than Pythia, unless given."""


class ModelConfig(Settings):
    """A decoder (GPT-NeoX, Pythia's architecture) or an encoder (BERT): tokens to hidden states, without a head."""

    family: Literal["gpt_neox", "bert"] = "gpt_neox"
    """The architecture; `bert` has other defaults (BERT's own: 512 positions, dropout 0.1, erf GELU, eps 1e-12)."""

    size: str | None = None
    """A named size such as `pythia-70m` or `bert-base`; it fills family and shape unless given."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer blocks."""

    hidden_size: int = Field(gt=0, le=2**20)
    """Width of the residual stream (D)."""

    num_heads: int = Field(gt=0)
    """Attention heads; must divide hidden_size."""

    intermediate_size: int | None = Field(default=None, gt=0, le=2**24)
    """Width of the MLP; 4 x hidden_size when left out."""

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
    """Base of the rotary frequencies."""

    parallel_residual: bool = True
    """x + attention(norm1 x) + mlp(norm2 x) in one go (Pythia), or one after the other."""

    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    """GELU by erf, or its tanh form, with which Pythia was trained; on a CPU the latter takes four times as long."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in layer norms."""

    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what each sublayer adds to the residual stream."""

    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of attention weights."""

    init: Literal["pythia", "normal"] = "pythia"
    """`pythia`: small-init, with wang-init for output projections; `normal`: init_std everywhere."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of `init: normal`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if given.get("size") is None:
            return {**(_BERT_DEFAULTS if given.get("family") == "bert" else {}), **given}
        if not isinstance(given["size"], str) or given["size"] not in NAMED_SIZES:
            raise ConfigError(
                "size",
                f"be one of {', '.join(NAMED_SIZES)}",
                got=repr(given["size"]),
                hint="or leave it out and give the shape",
            )
        filled = {**NAMED_SIZES[given["size"]], **given}
        return {**(_BERT_DEFAULTS if filled.get("family") == "bert" else {}), **filled}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ConfigError("hidden_size", f"be a multiple of num_heads ({self.num_heads})", got=self.hidden_size)
        if self.rotary_dims() % 2:
            raise ConfigError(
                "rotary_pct",
                f"rotate an even number of each head's {self.head_size()} dimensions",
                got=f"{self.rotary_pct} ({self.rotary_dims()} dimensions)",
            )
        return self

    @model_validator(mode="after")
    def _is_of_its_family(self) -> ModelConfig:
        foreign = {"rotary_pct": 0.0, "parallel_residual": False} if self.is_encoder() else {"token_types": 0}
        for field, value in foreign.items():
            if getattr(self, field) != value:
                raise ConfigError(field, f"be left out of a {self.family}", got=getattr(self, field))
        return self

    def is_encoder(self) -> bool:
        """Whether each token sees both sides, and learns by masking."""
        return self.family == "bert"

    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.hidden_size // self.num_heads

    def rotary_dims(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_size() * self.rotary_pct)

    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or 4 * self.hidden_size

    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
