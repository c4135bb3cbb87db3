"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.collectives import gather_from_group, scatter_to_group, copy_to_group, reduce_from_group, reduce_scatter_to_group
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.rng import per_rank_rng
from megahead.distributed.rendezvous import Launch, choose_device, connect, disconnect, read_launch
from megahead.distributed.rollcall import LostRankError, naming_lost_ranks
from megahead.distributed.print_once import print_error_once

__all__ = [
    "Group",
    "Launch",
    "LostRankError",
    "Mesh",
    "choose_device",
    "connect",
    "disconnect",
    "per_rank_rng",
    "gather_from_group",
    "naming_lost_ranks",
    "read_launch",
    "scatter_to_group",
    "copy_to_group",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "print_error_once",
]
