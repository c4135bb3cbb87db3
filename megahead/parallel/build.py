"""Makes a run's model: `assemble` makes its layers, `fill_` gives them values. No rank ever holds the full model."""

from __future__ import annotations

import torch
from torch import nn

from megahead.config import RunConfig
from megahead.distributed import Group, Tensors, take_rows_
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


def fill_(module: nn.Module, group: Group, weights: Tensors) -> None:
    """Sets every parameter to this rank's slice of the full tensor of its name.

    Beside the parameters memory holds a block of one of them, or all of one whose columns are split.
    """
    dims = shard_dims(module)
    for name, parameter in module.named_parameters():
        part = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if dims.get(name):  # not the rows
            part.copy_(group.shard(weights.read(name), dims[name]).detach())
        else:
            take_rows_(part, weights.blocks(name), group.rank * len(part) if name in dims else 0)
        parameter.data = part


def _split(full: Pretraining, config: RunConfig, group: Group) -> Pretraining:
    sharding, sequence = SHARDING[config.model.family], config.parallel.sequence
    parallelize_(full.backbone, sharding, group, sequence=sequence)
    if full.detection is not None:
        of_blocks = {pattern: kind for pattern, kind in sharding.items() if pattern != "embedding"}
        parallelize_(full.detection.generator, of_blocks, group, sequence=sequence)
    rows, features = config.model.padded_vocab_size() // group.size, config.model.hidden_size
    head = None if full.head is None else SplitOutputEmbedding(rows, features)
    layers = head, full.mask_head, full.output_bias, full.detection
    return TensorParallelPretraining(full.backbone, full.objective, full.vocab_size, *layers, group)
