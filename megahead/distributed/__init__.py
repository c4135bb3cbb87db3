"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.collectives import join, split, sum_backward, sum_forward, sum_scatter
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.randomness import drawn_apart
from megahead.distributed.rendezvous import Launch, choose_device, connect, disconnect, read_launch

__all__ = [
    "Group",
    "Launch",
    "Mesh",
    "choose_device",
    "connect",
    "disconnect",
    "drawn_apart",
    "join",
    "read_launch",
    "split",
    "sum_backward",
    "sum_forward",
    "sum_scatter",
]
