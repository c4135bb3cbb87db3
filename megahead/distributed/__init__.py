"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other."""

from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.rendezvous import Launch, choose_device, connect, disconnect, read_launch

__all__ = ["Group", "Launch", "Mesh", "choose_device", "connect", "disconnect", "read_launch"]
