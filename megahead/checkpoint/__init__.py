"""Step folders of whole named tensors: written atomically, verified when read, loadable on any mesh."""

from megahead.checkpoint.all_ranks import run_on_all_ranks
from megahead.checkpoint.folders import find_checkpoint
from megahead.checkpoint.reading import Checkpoint, newest_sound, open_checkpoint
from megahead.checkpoint.retention import Spare
from megahead.checkpoint.saving import Snapshot, save_checkpoint, write_snapshot

__all__ = [
    "Checkpoint",
    "Snapshot",
    "Spare",
    "find_checkpoint",
    "newest_sound",
    "open_checkpoint",
    "run_on_all_ranks",
    "save_checkpoint",
    "write_snapshot",
]
