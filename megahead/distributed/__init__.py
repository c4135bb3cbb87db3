"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.collectives import join, split, sum_backward, sum_forward, sum_scatter
from megahead.distributed.connection import connected, disconnect
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.randomness import drawn_apart
from megahead.distributed.rendezvous import Launch, choose_device, read_launch
from megahead.distributed.telling import tell_once
from megahead.distributed.watch import LostRankError

__all__ = [
    "Group",
    "Launch",
    "LostRankError",
    "Mesh",
    "choose_device",
    "connected",
    "disconnect",
    "drawn_apart",
    "join",
    "read_launch",
    "split",
    "sum_backward",
    "sum_forward",
    "sum_scatter",
    "tell_once",
]
