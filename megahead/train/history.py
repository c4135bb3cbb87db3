"""Which of the checkpoints in a run's folder led to its weights, when it may go back to older ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megahead.checkpoint import Checkpoint, is_step_folder, step_of, steps_in
from megahead.run_folder import RunFolder


@dataclass
class History:
    """All checkpoints up to step `newest` led to the run's weights. What lies above belongs to a history it turned
    away from (by an older one named to `--resume`, or past damaged ones), and is set aside when it saves."""

    root: Path
    """The run's folder of checkpoints."""

    newest: int = -1
    """Step of what the run last saved here, or went on from; -1 where that is none of these."""

    @staticmethod
    def of_resumed(resumed: Checkpoint | None, folder: RunFolder) -> History:
        """That of a session of the run in `folder`, which may go on from a checkpoint elsewhere or from none."""
        history = History(folder.checkpoints)
        if resumed is not None and history._holds(resumed) and is_step_folder(resumed.folder):
            history.newest = resumed.step
        return history

    def name_of(self, checkpoint: Checkpoint) -> str:
        """What a reader of this folder calls it."""
        return checkpoint.folder.name if self._holds(checkpoint) else str(checkpoint.folder)

    def advance_to(self, step: int) -> int:
        """A checkpoint of `step` is saved; returns the step before it."""
        before, self.newest = self.newest, step
        return before

    def to_be_abandoned(self) -> list[str]:
        """Names of the checkpoints that the next save sets aside."""
        return [folder.name for folder in steps_in(self.root) if step_of(folder) > self.newest]

    def _holds(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.parent.resolve() == self.root.resolve()
