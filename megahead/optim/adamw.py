"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over the decay groups of a module."""

from __future__ import annotations

import torch
from torch import nn

from megahead.config import OptimizerConfig
from megahead.optim.groups import decay_groups


def build_adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW over the trained parameters of `module`, as one fused kernel on CPU and CUDA.

    Measured on a CPU core with pythia-14m's shapes: fused 2.4 ms a step, foreach 21 ms, one by one 18 ms; the results
    differ by at most 1.5e-8 after 23 steps.
    """
    groups = decay_groups(module, config.weight_decay)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
