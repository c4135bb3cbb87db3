"""What Hugging Face calls a kind of model, its tensors and its settings: tables that are read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError


class Renames:
    """Pairs of names of modules, whose leaves (`weight`) stay as they are, or of single parameters; ours to theirs.

    `*` stands for a layer's number. Where theirs holds several of ours, one below the other, ours are a tuple.
    """

    def __init__(self, pairs: Mapping[str | tuple[str, ...], str]) -> None:
        self._ours = {theirs: (ours,) if isinstance(ours, str) else ours for ours, theirs in pairs.items()}
        if len(self._ours) != len(pairs):
            raise ValueError("two names of ours are one name of theirs")
        self._theirs = {ours: (theirs,) for theirs, several in self._ours.items() for ours in several}

    def theirs(self, name: str) -> str | None:
        """Their name of our parameter, or None where the table lacks it."""
        return next(iter(_translate(name, self._theirs)), None)

    def ours(self, name: str) -> tuple[str, ...]:
        """Our names of what their parameter holds, from its first row on; none where the table lacks it."""
        return _translate(name, self._ours)


def _translate(name: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    parts = name.split(".")
    pattern = ["*" if part.isdigit() else part for part in parts]
    known = next((n for n in (len(parts), len(parts) - 1) if ".".join(pattern[:n]) in table), None)
    if known is None:
        return ()
    found = []
    for target in table[".".join(pattern[:known])]:
        numbers = iter(part for part in parts if part.isdigit())
        found.append(".".join([next(numbers) if part == "*" else part for part in target.split(".")] + parts[known:]))
    return tuple(found)


USUAL = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
}
"""Settings of ours and theirs, in most kinds."""

GELU = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
SILU = {"silu": "silu", "swish": "silu"}
"""Activations of theirs and ours."""

_THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_DERIVED = {
    "num_key_heads": ModelConfig.key_heads,
    "head_dim": ModelConfig.head_size,
    "intermediate_size": ModelConfig.mlp_size,
}
"""Settings of ours that a method fills in where they are left out."""


@dataclass(frozen=True)
class SettingNames:
    """Settings of ours and theirs that mean the same, and the activation, whose values differ too."""

    same: Mapping[str, str]
    """From ours to theirs."""

    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: GELU)
    """From theirs to ours; the first is meant where config.json names none."""

    needed: tuple[str, ...] = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "vocab_size")
    """Settings of ours that config.json must have."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours where config.json says nothing else; the family is one."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of theirs that can have no other value."""

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """The part of config.json for `model` that these settings make."""
        values = {ours: _DERIVED[ours](model) if ours in _DERIVED else getattr(model, ours) for ours in self.same}
        renamed = {theirs: values[ours] for ours, theirs in self.same.items()}
        return {**renamed, self.activation: _THEIR_ACTIVATIONS[model.activation], **self.fixed}

    def settings(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings by config.json; FieldError for one that it lacks, or what is not ours."""
        for theirs in (self.same[ours] for ours in self.needed):
            if theirs not in content:
                raise FieldError(f"config.json: {theirs}", "be given", got="missing")
        activation = content.get(self.activation, next(iter(self.activations)))
        if activation not in self.activations:
            rule = f"be one of {', '.join(self.activations)}"
            raise FieldError(f"config.json: {self.activation}", rule, got=activation)
        for theirs, value in self.fixed.items():
            if (given := content.get(theirs, value)) != value:
                raise FieldError(f"config.json: {theirs}", f"be {value}".lower(), got=str(given).lower())
        if content.get("quantization_config") is not None:
            raise FieldError("config.json: quantization_config", "be missing (weights as they are)", got="given")
        known = {ours: content[theirs] for ours, theirs in self.same.items() if content.get(theirs) is not None}
        return {**self.defaults, **known, "activation": self.activations[activation]}


@dataclass(frozen=True)
class Family:
    """A kind of model that is exported and imported: all names that differ."""

    title: str
    """For people."""

    classes: str
    """What the names of its classes begin with."""

    predicts: str
    """`CausalLM` or `MaskedLM`, which classes with a head are for."""

    prefix: str
    """Begins the backbone's tensors in a model with a head; the backbone alone has them without."""

    heads: tuple[str, ...]
    """What the names of the head's tensors begin with."""

    table: Renames
    """Names of parameters."""

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the content of config.json to the settings of a ModelConfig."""

    config: Callable[[ModelConfig], dict[str, Any]]
    """From a ModelConfig to the content of config.json."""

    ignored: tuple[str, ...] = ()
    """Parts of names of what is no parameter of ours: poolers, buffers, the head's copy of a tied weight."""

    older: tuple[tuple[str, str], ...] = ()
    """Parts of names that some writers spell otherwise, and how the table does."""

    untied_bias: str | None = None
    """A second name of an encoder's output bias, wanted beside an output matrix of its own."""

    head_bias: str | None = None
    """Name of a decoder's output bias; None where it has none."""

    as_stored: Callable[[ModelConfig, str, Tensor], Tensor] = lambda _, __, tensor: tensor
    """From a parameter of ours, with its name, to the tensor that theirs stores."""

    zeros: Callable[[ModelConfig], dict[str, int]] = lambda _: {}
    """Vectors that theirs has and ours does without: names and sizes."""

    def with_head(self) -> str:
        """The class of a model with a head."""
        return f"{self.classes}For{self.predicts}"

    def ours(self, theirs: str) -> tuple[str, ...]:
        """Our names of what a stored tensor of theirs holds, in a model with a head or without; none for what we leave
        out. Raises FieldError for a name that this kind of model does not have."""
        if any(part in theirs for part in self.ignored):
            return ()
        name = theirs
        for spelled, usual in self.older:
            name = name.replace(spelled, usual)
        ours = self.table.ours(name if name.startswith((self.prefix, *self.heads)) else self.prefix + name)
        if not ours:
            raise FieldError("model", f"hold tensors of a {self.title} model only", got=f"one that has {theirs}")
        return ours
