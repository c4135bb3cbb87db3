"""Copies of a run's complete state in the memory of its nodes, from which it goes on when a node is lost.

They are files in a file system that is memory (tmpfs), so that they survive the processes that made them, and have the
format of a checkpoint; but a rank's folder holds only some of the files: its own, and its *ward's*, a rank on another
node whose *keeper* it is. *Whole*: of a copy, all of its files are on nodes that are there. *Mark*: what a session
writes into its run's folder; copies belong to it.
"""

from megahead.copies.handing_over import hand_over
from megahead.copies.keeping import Copy, MemoryCopies
from megahead.copies.node_memory import NodeMemory
from megahead.copies.rescue import Rescue, rescue_newer

__all__ = ["Copy", "MemoryCopies", "NodeMemory", "Rescue", "hand_over", "rescue_newer"]
