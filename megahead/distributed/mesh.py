"""The ranks as a grid, tensor x data: neighbours share one copy of the weights, columns share one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megahead.distributed.group import Group
from megahead.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """This rank's place: `tensor` ranks split each layer, `data` ranks split each batch.

    World rank = data.rank * tensor.size + tensor.rank, so that tensor groups are consecutive ranks
    (the fastest links of a node).
    """

    world: Group = field(default_factory=Group)
    tensor: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)

    @staticmethod
    def build(world: Group, tensor_size: int = 1) -> Mesh:
        """Cuts `world` into consecutive tensor groups of `tensor_size`. Collective over `world`."""
        if world.size % tensor_size:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world.size})", got=tensor_size)
        if tensor_size == 1:
            return Mesh(world, Group(), world)
        data_size = world.size // tensor_size
        grid = [[d * tensor_size + t for t in range(tensor_size)] for d in range(data_size)]
        seconds = world.timeout_seconds
        timeout = timedelta(seconds=seconds)
        tensor, _ = dist.new_subgroups_by_enumeration(grid, timeout)
        data, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*grid, strict=True)], timeout)
        data_rank, tensor_rank = divmod(world.rank, tensor_size)
        return Mesh(world, Group(tensor_rank, tensor_size, tensor, seconds), Group(data_rank, data_size, data, seconds))
