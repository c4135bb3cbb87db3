"""Which checkpoints in a run's folder led to its present weights: not all, if it was resumed from an older one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megahead.checkpoint import Checkpoint, is_step_folder, step_of, steps_in
from megahead.run_folder import RunFolder


@dataclass
class Lineage:
    """All checkpoints up to step `tip` led to the run's weights. Later ones belong to a branch that the run abandoned
    when it went on from an older checkpoint (one given to `--resume`, or because newer ones are damaged); the next save
    sets them aside."""

    root: Path
    """The run's folder of checkpoints."""

    tip: int = -1
    """Step of the checkpoint in `root` that the run last saved or resumed from; -1 if there is none yet."""

    @staticmethod
    def of_resumed(resumed: Checkpoint | None, folder: RunFolder) -> Lineage:
        """A session's lineage in the run folder `folder`; `resumed` may also be None or a checkpoint elsewhere."""
        lineage = Lineage(folder.checkpoints)
        if resumed is not None and lineage._holds(resumed) and is_step_folder(resumed.folder):
            lineage.tip = resumed.step
        return lineage

    def name_of(self, checkpoint: Checkpoint) -> str:
        """Its folder's name if it is in `root`, else its full path."""
        return checkpoint.folder.name if self._holds(checkpoint) else str(checkpoint.folder)

    def to_be_abandoned(self) -> list[str]:
        """Names of the checkpoints that the next save sets aside."""
        return [folder.name for folder in steps_in(self.root) if step_of(folder) > self.tip]

    def _holds(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.parent.resolve() == self.root.resolve()
