"""Step folders of whole named tensors: written atomically, verified when read, loadable on any mesh."""

from megahead.checkpoint.folders import find_checkpoint
from megahead.checkpoint.reading import Checkpoint, open_checkpoint
from megahead.checkpoint.saving import save_checkpoint

__all__ = ["Checkpoint", "find_checkpoint", "open_checkpoint", "save_checkpoint"]
