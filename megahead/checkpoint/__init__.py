"""Checkpoints: folders `step-N` of full (unsharded) named tensors, written atomically, verified when read, loadable on
any mesh.

*Complete*: every file has its full length; *sound*: its checksum matches too. *Set aside*: renamed to
`abandoned-step-N`, because the run went on from an older checkpoint. *Snapshot*: what one rank will write.
*Stale rows*: rows of an embedding as of their last update, saved with what they need to be brought up to date.
"""

from megahead.checkpoint.all_ranks import run_long_on_all_ranks, run_on_all_ranks
from megahead.checkpoint.counters import target_samples
from megahead.checkpoint.folders import abandoned_in, find_checkpoint, is_step_folder, step_folder, step_of, steps_in
from megahead.checkpoint.reading import Checkpoint, newest_sound, open_checkpoint, open_together
from megahead.checkpoint.retention import KeepRules
from megahead.checkpoint.saving import save_checkpoint, write_snapshot, write_together
from megahead.checkpoint.snapshot import Snapshot

__all__ = [
    "Checkpoint",
    "KeepRules",
    "Snapshot",
    "abandoned_in",
    "find_checkpoint",
    "is_step_folder",
    "newest_sound",
    "open_checkpoint",
    "open_together",
    "run_long_on_all_ranks",
    "run_on_all_ranks",
    "save_checkpoint",
    "step_folder",
    "step_of",
    "steps_in",
    "target_samples",
    "write_snapshot",
    "write_together",
]
