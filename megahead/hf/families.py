"""Tables that translate a model's parameter names and settings to Hugging Face's, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError


class ParameterNames:
    """A table from parameter names of megahead to Hugging Face's, for modules (with their `weight`s and `bias`es) or
    single parameters.

    `*` stands for a layer's number. Where a tensor of Hugging Face stacks several of ours, the key is their tuple.
    """

    def __init__(self, pairs: Mapping[str | tuple[str, ...], str]) -> None:
        self._names = {hf_name: (key,) if isinstance(key, str) else key for key, hf_name in pairs.items()}
        if len(self._names) != len(pairs):
            raise ValueError("two names of megahead have the same Hugging Face name")
        self._hf_names = {name: (hf_name,) for hf_name, names in self._names.items() for name in names}

    def to_hf(self, name: str) -> str:
        """Returns the Hugging Face name of a parameter; ValueError where the table lacks it."""
        (hf_name,) = _translate(name, self._hf_names)
        return hf_name

    def from_hf(self, hf_name: str) -> tuple[str, ...]:
        """Returns the parameters that a stored tensor consists of, from its first row on; empty where the table lacks
        it."""
        return _translate(hf_name, self._names)


def _translate(name: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    layer = next(filter(str.isdigit, name.split(".")), "")
    pattern = name.replace(f".{layer}.", ".*.", 1)
    module, _, part = pattern.rpartition(".")
    targets = table.get(pattern) or [f"{target}.{part}" for target in table.get(module, ())]
    return tuple(target.replace("*", layer) for target in targets)


QUERY_KEY_VALUE_MODULES = tuple(f"backbone.blocks.*.attention.{part}" for part in ("query", "key", "value"))
"""Modules that one tensor of Hugging Face may stack."""

COMMON_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
}
"""From settings of megahead to Hugging Face's, as most families have them."""

GELU_NAMES = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
SILU_NAMES = {"silu": "silu", "swish": "silu"}
"""From activations of Hugging Face to ours."""

_HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def filled_settings(model: ModelConfig) -> dict[str, Any]:
    """Returns all settings, with the defaults that depend on other settings filled in."""
    sizes = {"num_key_heads": model.key_heads(), "head_dim": model.head_size(), "intermediate_size": model.mlp_size()}
    return {**model.model_dump(mode="json"), **sizes}


def require_key(condition: object, name: str, rule: str, *, got: Any) -> None:
    """FieldError for a key of config.json unless `condition`."""
    if not condition:
        raise FieldError(f"config.json: {name}", rule, got=got)


def rope_type_of(rope: Mapping[str, Any]) -> Any:
    """Returns how `rope_parameters` scale rotary frequencies: by the key of transformers 5, or else its older name."""
    return rope.get("rope_type", rope.get("type", "default"))


@dataclass(frozen=True)
class SettingNames:
    """A table from settings of megahead to keys of config.json with the same values, and the activation, whose values
    differ too."""

    hf_names: Mapping[str, str]

    activation: str = "hidden_act"
    """Key of the activation in config.json."""

    activations: Mapping[str, str] = field(default_factory=lambda: GELU_NAMES)
    """From activations of Hugging Face to ours; the first is the default."""

    required: tuple[str, ...] = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "vocab_size")
    """Settings of megahead that config.json must have."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of megahead's settings, `family` among them, that hold where config.json has no key for the setting."""

    required_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json, each with the only value that is supported."""

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Returns the entries of config.json that these settings make."""
        values = filled_settings(model)
        renamed = {hf_name: values[name] for name, hf_name in self.hf_names.items()}
        return {**renamed, self.activation: _HF_ACTIVATIONS[model.activation], **self.required_values}

    def model_settings(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a ModelConfig; FieldError for one that config.json lacks, or that is unsupported."""
        for hf_name in (self.hf_names[name] for name in self.required):
            require_key(hf_config.get(hf_name) is not None, hf_name, "be given", got="missing")
        activation, rule = hf_config.get(self.activation, next(iter(self.activations))), ", ".join(self.activations)
        require_key(activation in self.activations, self.activation, f"be one of {rule}", got=activation)
        for hf_name, value in self.required_values.items():
            stored = hf_config.get(hf_name, value)
            require_key(stored == value, hf_name, f"be {value}".lower(), got=str(stored).lower())
        is_quantized = hf_config.get("quantization_config") is not None
        require_key(not is_quantized, "quantization_config", "be missing (weights as they are)", got="given")
        items = self.hf_names.items()
        settings = {name: hf_config[hf_name] for name, hf_name in items if hf_config.get(hf_name) is not None}
        return {**self.defaults, **settings, "activation": self.activations[activation]}


# Layers with global attention at equal distances, and local ones between them.

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def layer_types(num_layers: int, interval: int, offset: int) -> list[str]:
    """Returns `layer_types` of config.json: every `interval`-th layer is global. `offset` 0: the first layer is
    global; 1: `interval` - 1 local layers come before the first global one."""
    return [LOCAL if (layer + offset) % interval else GLOBAL for layer in range(num_layers)]


def global_interval(hf_config: Mapping[str, Any], legacy_key: str, default: int, offset: int) -> int:
    """Returns the distance from one global layer to the next: by `layer_types`, or else by the `legacy_key` of older
    versions. FieldError if layers are distributed in another way than with this `offset`."""
    num_layers, stored = hf_config["num_hidden_layers"], hf_config.get("layer_types")
    legacy_interval = hf_config.get(legacy_key)
    interval = default if legacy_interval is None else int(legacy_interval)
    if stored is None:
        return interval
    distances = (layer + offset for layer, layer_type in enumerate(stored) if layer_type == GLOBAL)
    interval = next(filter(None, distances), max(interval, num_layers + offset))
    rule = f"be {GLOBAL} at equal distances{'' if offset else ', from the first layer on'}"
    require_key(list(stored) == layer_types(num_layers, interval, offset), "layer_types", rule, got="another list")
    return interval


@dataclass(frozen=True)
class Family:
    """A model architecture of Hugging Face that is exported and imported: its names of classes, tensors, settings."""

    title: str
    """Name in messages and model cards."""

    class_prefix: str
    """Prefix of its class names: `GPTNeoX`."""

    head_type: str
    """`CausalLM` or `MaskedLM`, the suffix of its class with a head."""

    base_model_prefix: str
    """Prefix of the backbone's tensors in a model with a head; a backbone alone stores them without it."""

    head_prefixes: tuple[str, ...]
    """Prefixes of the head's tensors."""

    names: ParameterNames

    model_settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the content of config.json to the settings of a ModelConfig."""

    hf_config: Callable[[ModelConfig], dict[str, Any]]
    """From a ModelConfig to the content of config.json."""

    class_with_head: str | None = None
    """Name of its class with a head; by default its prefix, `For` and its head's type."""

    is_tied_by_default: bool = False
    """Whether a decoder's outputs are scored against the input embedding where config.json does not say it."""

    disk_offloaded_modules: tuple[str, ...] = ()
    """Modules of a decoder that can be read from disk for each call."""

    cpu_modules: tuple[str, ...] = ()
    """A decoder's other modules."""

    ignored_keys: tuple[str, ...] = ()
    """Substrings of names of tensors that are not imported: poolers, buffers, the head's copy of a tied weight."""

    legacy_keys: tuple[tuple[str, str], ...] = ()
    """Pairs of substrings of names: as some writers spell them, and as `names` does."""

    transposed_names: tuple[str, ...] = ()
    """Endings of names of stored matrices [inputs, outputs]; ours are [outputs, inputs]."""

    untied_bias_name: str | None = None
    """A second name under which an encoder's output bias is stored too, if the output matrix is untied."""

    head_bias_name: str | None = None
    """Name of a decoder's output bias; None where it has none."""

    to_hf_tensor: Callable[[ModelConfig, str, Tensor], Tensor] = lambda _, __, tensor: tensor
    """From a parameter of megahead, with its name, to the stored tensor."""

    weights_with_bias: tuple[str, ...] = ()
    """Endings of names of weights whose layer has a bias in Hugging Face's class, and may have none in ours."""

    def head_class(self) -> str:
        """Returns the name of the class with a head."""
        return self.class_with_head or f"{self.class_prefix}For{self.head_type}"

    def parameter_names(self, hf_name: str) -> tuple[str, ...]:
        """Returns the parameters that a stored tensor consists of, in a model with a head or without; empty for one
        that is not imported. Raises FieldError for a name that this family does not have."""
        if any(key in hf_name for key in self.ignored_keys):
            return ()
        name = hf_name
        for legacy, current in self.legacy_keys:
            name = name.replace(legacy, current)
        has_prefix = name.startswith((self.base_model_prefix, *self.head_prefixes))
        names = self.names.from_hf(name if has_prefix else self.base_model_prefix + name)
        if not names:
            raise FieldError("model", f"hold tensors of a {self.title} model only", got=f"one that has {hf_name}")
        return names
