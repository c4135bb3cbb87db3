"""A run's model over a tensor group: the weights of one rank, sliced, without the whole model anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megahead import pretraining
from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.models import SHARDING
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import SplitOutputEmbedding, TensorParallelPretraining
from megahead.pretraining import Pretraining, first_weights


def build(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The run's model on `device`, split over `group`: the same initial weights on every mesh. Sends nothing."""
    module = assemble(config, group, device)
    fill_(module, group, first_weights(config))
    return module


def assemble(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The run's layers, split over `group`, with hollow parameters: a shape on `device`, but no room for weights.

    `fill_` gives them both; so does an engine that cuts them up further. One rank gets the plain layers, which do less.
    """
    with torch.device("meta"):
        module = pretraining.assemble(config)
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
    """Sets every parameter to this rank's slice of `weights(its name)`, which is whole; one at a time."""
    dims = shard_dims(module)
    for name, parameter in module.named_parameters():
        whole = weights(name)
        part = whole if name not in dims else group.shard(whole, dims[name])
        parameter.data = torch.empty(part.shape, dtype=parameter.dtype, device=parameter.device).copy_(part.detach())


def _split(whole: Pretraining, config: RunConfig, group: Group) -> Pretraining:
    parallelize_(whole.backbone, SHARDING[config.model.family], group, sequence=config.parallel.sequence)
    rows, features = config.model.padded_vocab_size() // group.size, config.model.hidden_size
    head = None if whole.head is None else SplitOutputEmbedding(rows, features)
    return TensorParallelPretraining(whole.backbone, whole.objective, whole.vocab_size, head, whole.mask_head, group)
