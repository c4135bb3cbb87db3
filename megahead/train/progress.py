"""How far a run has come: all that a checkpoint holds of it, taken at one step and put back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megahead.checkpoint import Checkpoint, Snapshot, newest_sound
from megahead.config import Phase, learn_alike
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.train.birth import WithNewHead
from megahead.train.identity import config_of
from megahead.train.lineage import Lineage
from megahead.train.moment import Moment
from megahead.train.start import refuse_damaged
from megahead.train.state import TrainingState


@dataclass(frozen=True)
class Progress:
    """Of a run in one of its phases. All methods are collective over `world_group`."""

    phase: Phase

    engine: Engine
    """Has weights, and what the optimizer knows of them."""

    state: TrainingState
    """All that is counted."""

    lineage: Lineage
    """The checkpoints that led there."""

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    world_group: Group
    """All ranks, for CPU tensors."""

    def moment(self, group: Group, *, copied: bool) -> Moment:
        """The present one, of which each rank of `group` will write a share. `copied`: so that training may go on."""
        tensors = chain(self.engine.tensors(), self.state.tensors(self.data_group).items())
        snapshot = Snapshot.take(tensors, group, copied=copied)
        of_engine = {"optimizer_steps": self.engine.optimizer_steps, "scale": self.engine.loss_scale.state()}
        counters = self.state.counters() | of_engine | {"phase_began": self.phase.steps.start}
        settings = self.phase.config.model_dump(mode="json")
        return Moment(self.state.step, snapshot, counters, settings, self.lineage.tip)

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Continues exactly where `checkpoint` was saved, by the objective of the phase."""
        self._load(checkpoint)
        self.state.restore(checkpoint, self.data_group)
        self._forget_another_phase(checkpoint)

    def roll_back(self) -> Path | None:
        """Restores weights and counters of what was learned from the newest sound checkpoint of the lineage; reading
        goes on with the next samples.

        Returns the checkpoint's folder; None where there is none that the phase went on from: nothing changes.
        """
        root = self.lineage.root
        checkpoint, damage = newest_sound(root, self.world_group, up_to=self.lineage.tip)
        if checkpoint is None:
            refuse_damaged(root, damage)
        if checkpoint is None or checkpoint.step < self.phase.steps.start:
            return None
        self._load(checkpoint)
        self.state.roll_back_to(checkpoint, self.data_group)
        self._forget_another_phase(checkpoint)
        self.lineage.tip = checkpoint.step
        return checkpoint.folder

    def _load(self, checkpoint: Checkpoint) -> None:
        self.engine.load(WithNewHead(checkpoint), checkpoint.state_value("optimizer_steps", int))
        self.engine.loss_scale.restore(checkpoint.state_value("scale", dict, absent={}))

    def _forget_another_phase(self, checkpoint: Checkpoint) -> None:
        """Another phase's losses say nothing about spikes of this one's; nor do next tokens, counted as targets, say
        how often masked ones are targets."""
        saved, config = config_of(checkpoint), self.phase.config
        if not learn_alike(saved, config):
            self.state.recent_losses.clear()
        if saved.model.is_causal != config.model.is_causal:
            self.state.forget_targets()
