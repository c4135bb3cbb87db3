"""Who computes with whom: groups of ranks as values, the mesh, and how ranks find each other.

*Group*: ranks that communicate; a single rank is a group, too. *Mesh*: data-parallel x tensor-parallel ranks.
*Launch*: what torchrun, deepspeed or srun passed to this process. *Store*: torch's key-value store. *Line*: a TCP
connection that each rank has to rank 0 beside torch's; the *switchboard* there finds out which rank died or hangs, and
a rank's *watch* learns that from it.
"""

from megahead.distributed.bf16_units import multiplies_bf16_fast
from megahead.distributed.blocks import (
    Finite,
    Renamed,
    Tensors,
    Whole,
    all_finite,
    block_ranges,
    is_finite,
    joined,
    require_finite,
    take_rows_,
)
from megahead.distributed.collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from megahead.distributed.connection import connected, look_on
from megahead.distributed.group import Group
from megahead.distributed.mesh import Mesh
from megahead.distributed.passing import pass_on
from megahead.distributed.print_once import print_error_once
from megahead.distributed.rendezvous import Launch, choose_device, read_launch
from megahead.distributed.rng import per_rank_rng
from megahead.distributed.row_shards import RowShard, fill_row_shard_, interleave_rows
from megahead.distributed.watch import LostRankError

__all__ = [
    "Finite",
    "Group",
    "Launch",
    "LostRankError",
    "Mesh",
    "Renamed",
    "RowShard",
    "Tensors",
    "Whole",
    "all_finite",
    "block_ranges",
    "choose_device",
    "connected",
    "copy_to_group",
    "fill_row_shard_",
    "gather_from_group",
    "interleave_rows",
    "is_finite",
    "joined",
    "look_on",
    "multiplies_bf16_fast",
    "pass_on",
    "per_rank_rng",
    "print_error_once",
    "read_launch",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "require_finite",
    "scatter_to_group",
    "take_rows_",
]
