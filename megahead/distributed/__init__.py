"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.print_once import print_error_once
from megahead.distributed.rendezvous import Launch, choose_device, connect, connected, disconnect, read_launch
from megahead.distributed.rng import per_rank_rng
from megahead.distributed.rollcall import LostRankError, naming_lost_ranks

__all__ = [
    "Group",
    "Launch",
    "LostRankError",
    "Mesh",
    "choose_device",
    "connect",
    "connected",
    "copy_to_group",
    "disconnect",
    "gather_from_group",
    "naming_lost_ranks",
    "per_rank_rng",
    "print_error_once",
    "read_launch",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
]
