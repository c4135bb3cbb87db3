"""The ranks as a grid, data ranks x tensor ranks: a row splits one copy of the weights, a column splits each batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megahead.distributed.group import Group
from megahead.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """This rank's groups: the ranks of `tensor_group` split each layer, those of `data_group` each batch.

    World rank = data rank * tensor size + tensor rank: a tensor group is consecutive ranks, with the fastest links.
    """

    world_group: Group = field(default_factory=Group)
    tensor_group: Group = field(default_factory=Group)
    data_group: Group = field(default_factory=Group)

    @staticmethod
    def build(world_group: Group, tensor_size: int = 1) -> Mesh:
        """Divides `world_group` into tensor groups of `tensor_size` consecutive ranks. Collective over all of it."""
        if world_group.size % tensor_size:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_group.size})", got=tensor_size)
        if tensor_size == 1:
            return Mesh(world_group, Group(), world_group)
        data_size = world_group.size // tensor_size
        grid = [[d * tensor_size + t for t in range(tensor_size)] for d in range(data_size)]
        seconds = world_group.timeout_seconds
        timeout = timedelta(seconds=seconds)
        tensor, _ = dist.new_subgroups_by_enumeration(grid, timeout)
        data, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*grid, strict=True)], timeout)
        data_rank, tensor_rank = divmod(world_group.rank, tensor_size)
        return Mesh(
            world_group, Group(tensor_rank, tensor_size, tensor, seconds), Group(data_rank, data_size, data, seconds)
        )
