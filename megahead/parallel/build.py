"""Makes a run's model: `assemble` makes its layers, `fill_` gives them values. No rank ever holds the full model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.models import SHARDING
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import SplitOutputEmbedding, TensorParallelPretraining
from megahead.pretraining import Pretraining, build_pretraining


def assemble(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The model of `config`, split over `group`, with hollow parameters: they have a shape on `device`, but no memory.

    `fill_` gives them memory and values; so does an engine, which may partition them further. With one rank the layers
    are the plain ones. Sends nothing.
    """
    with torch.device("meta"):
        module: Pretraining = build_pretraining(config)
        if group.size > 1:
            module = _split(module, config, group)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            one_number = torch.zeros((), dtype=parameter.dtype, device=device)
            setattr(layer, name, nn.Parameter(one_number.expand(parameter.shape)))
    for name in shard_dims(module):
        module.get_parameter(name).model_parallel = True  # type: ignore[attr-defined]  # lost on the way from meta
    return module


def fill_(module: nn.Module, group: Group, weights: Callable[[str], Tensor]) -> None:
    """Sets every parameter to this rank's slice of the full tensor `weights(its name)`, one at a time."""
    dims = shard_dims(module)
    for name, parameter in module.named_parameters():
        full = weights(name)
        part = full if name not in dims else group.shard(full, dims[name])
        parameter.data = torch.empty(part.shape, dtype=parameter.dtype, device=parameter.device).copy_(part.detach())


def _split(full: Pretraining, config: RunConfig, group: Group) -> Pretraining:
    parallelize_(full.backbone, SHARDING[config.model.family], group, sequence=config.parallel.sequence)
    rows, features = config.model.padded_vocab_size() // group.size, config.model.hidden_size
    head = None if full.head is None else SplitOutputEmbedding(rows, features)
    return TensorParallelPretraining(full.backbone, full.objective, full.vocab_size, head, full.mask_head, group)
