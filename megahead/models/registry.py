"""From a config's `family` to its backbone and its sharding table."""

from __future__ import annotations

from collections.abc import Callable

from megahead.config import ModelConfig
from megahead.models import bert, gpt_neox, llama, modernbert
from megahead.models.backbone import Backbone

_BACKBONES: dict[str, Callable[[ModelConfig], Backbone]] = {
    "gpt_neox": gpt_neox.GPTNeoX,
    "llama": llama.Llama,
    "bert": bert.Bert,
    "modernbert": modernbert.ModernBert,
}

SHARDING: dict[str, dict[str, str]] = {
    "gpt_neox": gpt_neox.SHARDING,
    "llama": llama.SHARDING,
    "bert": bert.SHARDING,
    "modernbert": modernbert.SHARDING,
}
"""Per family: pattern of module names (`*` is one layer's number) -> how it splits, in words of `parallel`."""


def build_backbone(config: ModelConfig) -> Backbone:
    """The backbone of `config` on torch's current default device, its weights undefined; on `meta` it costs nothing."""
    return _BACKBONES[config.family](config)
