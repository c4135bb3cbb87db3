"""A run's model over a tensor group: the weights of one rank, sliced, without the whole model anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megahead import pretraining
from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.models import SHARDING, initial_value
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import SplitOutputEmbedding, TensorParallelPretraining
from megahead.pretraining import Pretraining


def build(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The run's model on `device`, split over `group`: the same initial weights on every mesh.

    Layers are replaced on the meta device; then each parameter is drawn whole and sliced, one at a time. One rank
    gets the plain layers, which do less. Sends nothing.
    """
    if group.size == 1:
        return pretraining.build(config, device)
    with torch.device("meta"):
        module = _assemble(config, group)
    module = module.to_empty(device=device)
    fill_(module, group, lambda name, shape: initial_value(name, shape, config.seed, config.model))
    if module.temperature is not None:
        module.temperature.reset_()
    return module


def fill_(module: nn.Module, group: Group, value: Callable[[str, torch.Size], Tensor]) -> None:
    """Sets every parameter to this rank's slice of `value(its name, its whole shape)`, and marks the slices."""
    dims = shard_dims(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape, dim = list(parameter.shape), dims.get(name)
            if dim is None:
                parameter.copy_(value(name, parameter.shape))
            else:
                shape[dim] *= group.size
                parameter.copy_(group.shard(value(name, torch.Size(shape)), dim))
                parameter.model_parallel = True  # type: ignore[attr-defined]  # lost on the way from meta


def _assemble(config: RunConfig, group: Group) -> Pretraining:
    whole = pretraining.assemble(config)
    parallelize_(whole.backbone, SHARDING[config.model.family], group, sequence=config.parallel.sequence)
    rows, features = config.model.padded_vocab_size() // group.size, config.model.hidden_size
    head = None if whole.head is None else SplitOutputEmbedding(rows, features)
    return TensorParallelPretraining(whole.backbone, whole.objective, whole.vocab_size, head, group)
