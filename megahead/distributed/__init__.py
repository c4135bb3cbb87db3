"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.collectives import join, split, sum_backward, sum_forward, sum_scatter
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.randomness import drawn_apart
from megahead.distributed.rendezvous import Launch, choose_device, connect, disconnect, read_launch
from megahead.distributed.rollcall import LostRankError, naming_lost_ranks
from megahead.distributed.telling import tell_once

__all__ = [
    "Group",
    "Launch",
    "LostRankError",
    "Mesh",
    "choose_device",
    "connect",
    "disconnect",
    "drawn_apart",
    "join",
    "naming_lost_ranks",
    "read_launch",
    "split",
    "sum_backward",
    "sum_forward",
    "sum_scatter",
    "tell_once",
]
