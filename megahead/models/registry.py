"""Backbone families by name, their parallelize plans, and the initialization of weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.distributed.tensors import block_ranges
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
"""Per family: pattern of module names (`*` stands for a layer's number) -> its kind of parallel layer."""


def build_backbone(config: ModelConfig) -> Backbone:
    """The backbone of `config` on torch's default device, with uninitialized weights. On `meta` it costs nothing."""
    return _BACKBONES[config.family](config)


# Random initial weights depend only on the seed and the parameter's name: the same on every mesh and device.
#
# Pythia: normal weights with std sqrt(2 / (5 D)) ("small init", Nguyen & Salazar 2019, arXiv 1910.05895), and 2 / (L
# sqrt(D)) where a sublayer writes to the residual stream (GPT-J's "wang init"); biases 0, norms 1. Megatron (Shoeybi
# et al. 2019, arXiv 1909.08053): one std, and 1 / sqrt(2 L) of it where a sublayer writes there.


_WRITES_TO_RESIDUAL = ("attention.output.weight", "mlp.down.weight")
_RANDN_CHUNK = 16  # torch.randn redraws the last 16 elements of a count that is no multiple of 16


def initial_value(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Tensor:
    """The initial value of the full parameter `name`, an fp32 CPU tensor.

    A matrix with more rows starts with the same rows: padding of the vocabulary changes no token's weights.
    """
    return next(_initial_blocks(name, shape, [range(shape[0])], seed, config))


def initial_blocks(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Iterator[Tensor]:
    """The same, bit for bit, in consecutive blocks of at most 16,384 rows, each drawn when it is needed."""
    return _initial_blocks(name, shape, block_ranges(shape[0]), seed, config)


def _initial_blocks(
    name: str, shape: Sequence[int], blocks: Iterable[range], seed: int, config: ModelConfig
) -> Iterator[Tensor]:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    for rows in blocks:
        size = (len(rows), *shape[1:])
        if name.endswith("norm.weight"):
            yield torch.ones(size)
        elif name.endswith(".bias"):
            yield torch.zeros(size)
        else:
            count = math.prod(size)
            draws = torch.randn(-(-count // _RANDN_CHUNK) * _RANDN_CHUNK, generator=generator)
            yield draws[:count].view(size).mul_(_std(name, config))


def _std(name: str, config: ModelConfig) -> float:
    if name.endswith("embedding.weight") and config.init_embedding_std is not None:
        return config.init_embedding_std
    if config.init == "normal":
        return config.init_std
    if config.init == "megatron":
        return config.init_std / (math.sqrt(2 * config.num_layers) if name.endswith(_WRITES_TO_RESIDUAL) else 1)
    if name.endswith(_WRITES_TO_RESIDUAL):
        return 2 / (config.num_layers * math.sqrt(config.hidden_size))
    return math.sqrt(2 / (5 * config.hidden_size))
