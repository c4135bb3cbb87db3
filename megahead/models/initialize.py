"""Random weights that depend on the seed and a parameter's name alone: the same on every mesh and device.

Pythia: normal weights with std sqrt(2 / (5 D)) ("small init", Nguyen & Salazar 2019, arXiv 1910.05895), and
2 / (L sqrt(D)) where a sublayer writes to the residual stream (GPT-J's "wang init"); biases 0, norms 1.
Megatron (Shoeybi et al. 2019, arXiv 1909.08053): one std, and 1 / sqrt(2 L) of it where a sublayer writes there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megahead.config import ModelConfig

_WRITES_TO_RESIDUAL = ("attention.output.weight", "mlp.down.weight")
_BLOCK = 16  # torch draws normal numbers on the CPU in blocks of 16, the last of them again when it is not full


def initial_value(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Tensor:
    """The fp32 CPU tensor that the full parameter `name` starts from.

    A matrix with more rows starts with the same rows: padding of the vocabulary changes no token's weights.
    """
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    if name.endswith(".bias"):
        return torch.zeros(*shape)
    count = math.prod(shape)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    draws = torch.randn(-(-count // _BLOCK) * _BLOCK, generator=generator)
    return draws[:count].view(*shape).mul_(_std(name, config))


def _std(name: str, config: ModelConfig) -> float:
    if config.init == "normal":
        return config.init_std
    if config.init == "megatron":
        return config.init_std / (math.sqrt(2 * config.num_layers) if name.endswith(_WRITES_TO_RESIDUAL) else 1)
    if name.endswith(_WRITES_TO_RESIDUAL):
        return 2 / (config.num_layers * math.sqrt(config.hidden_size))
    return math.sqrt(2 / (5 * config.hidden_size))
