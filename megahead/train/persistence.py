"""How a run goes on from its checkpoints: resumes from one, or rolls back to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megahead.checkpoint import (
    Checkpoint,
    abandoned_in,
    find_checkpoint,
    newest_sound,
    open_together,
    run_on_all_ranks,
)
from megahead.config import Phase, RunConfig, RunPlan, learn_alike
from megahead.copies import Rescue
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.errors import CheckpointError
from megahead.mirror import Fetched
from megahead.run_folder import RunFolder
from megahead.train.birth import WithNewHead
from megahead.train.identity import config_of
from megahead.train.lineage import Lineage
from megahead.train.state import TrainingState


@dataclass(frozen=True)
class Start:
    """What a session goes on from."""

    checkpoint: Checkpoint | None
    """Every byte verified; None: from the beginning."""

    damage: list[str]
    """A sentence for each newer but damaged checkpoint."""

    rescue: Rescue | None = None
    """Where there were newer copies in memory, what came of them: perhaps this checkpoint."""

    fetched: Fetched | None = None
    """The same for newer checkpoints in the mirror."""

    def lines(self) -> list[tuple[str, str]]:
        """For the banner."""
        lines = [("damaged", sentence) for sentence in self.damage]
        if self.rescue is not None:
            lines += [("in memory", sentence) for sentence in self.rescue.sentences()]
        if self.fetched is not None:
            lines += [("mirror", sentence) for sentence in self.fetched.sentences()]
        if self.checkpoint is not None:
            lines.append(("resumed", f"step {self.checkpoint.step:,}, {self.checkpoint.folder}"))
        return lines

    def facts(self) -> dict[str, Any]:
        """For the log."""
        facts: dict[str, Any] = {"damaged": self.damage}
        facts |= {} if self.rescue is None else {"memory": self.rescue.facts()}
        return facts if self.fetched is None else facts | {"mirror": self.fetched.facts()}


def _nothing_newer(than: int) -> None:
    return None


def find_resume(
    resume: str,
    folder: RunFolder,
    world_group: Group,
    rescue: Callable[[int], Rescue | None] = _nothing_newer,
    fetch: Callable[[int], Fetched | None] = _nothing_newer,
) -> Start:
    """What `--resume auto|never|DIR` asks for. Collective.

    `rescue`: makes a checkpoint in `folder` of what is newer in memory than a step (-1: than nothing), if `auto` may
    take it; `fetch`: of what is newer in the mirror. Otherwise nothing is written.
    """
    if resume != "auto":
        named = run_on_all_ranks(world_group, lambda: _named(resume, folder) if world_group.rank == 0 else None)[0]
        return Start(None if named is None else open_together(named, world_group), [])
    checkpoint, damage = newest_sound(folder.path, world_group)
    rescued = rescue(-1 if checkpoint is None else checkpoint.step)
    checkpoint = (rescued and rescued.checkpoint) or checkpoint
    fetched = fetch(-1 if checkpoint is None else checkpoint.step)
    checkpoint = (fetched and fetched.checkpoint) or checkpoint
    if checkpoint is None:
        _refuse_damaged(folder.path, [*damage, *(fetched.problems if fetched else ())])
        run_on_all_ranks(world_group, lambda: _refuse_abandoned(folder) if world_group.rank == 0 else None)
    return Start(checkpoint, damage, rescued, fetched)


def _refuse_damaged(folder: Path, damage: list[str]) -> None:
    if damage:
        raise CheckpointError(
            f"{folder} must hold a sound checkpoint to resume, but holds only damaged ones ({len(damage)}); "
            f"remove them to start again: {' '.join(damage)}"
        )


def _refuse_abandoned(folder: RunFolder) -> None:
    abandoned = abandoned_in(folder.path)
    if abandoned:
        raise CheckpointError(
            f"{folder} must hold a checkpoint to resume, but holds only {', '.join(path.name for path in abandoned)}; "
            "name the one to continue from with --resume, or start again with --resume never."
        )


def _named(resume: str, folder: RunFolder) -> Path | None:
    there = find_checkpoint(folder.path if resume == "never" else Path(resume))
    if resume == "never" and there is not None:
        raise CheckpointError(
            f"`--resume never` needs an output folder without checkpoints, but {folder} has {there.name}; "
            "choose another output_dir, or remove that checkpoint."
        )
    if resume != "never" and there is None:
        raise CheckpointError(f"`--resume` must be auto, never or a checkpoint folder, but {resume} holds none.")
    return there


def agreed_candidate_group_samples(plan: RunPlan, checkpoint: Checkpoint | None) -> int:
    """Samples per candidate group (whose targets are candidates for each other): what a resumed run began with, for a
    new run the plan's."""
    return plan.group_samples(None if checkpoint is None else checkpoint.state_value("group_samples", int))


def resume_from(
    checkpoint: Checkpoint, config: RunConfig, engine: Engine, state: TrainingState, data_group: Group
) -> None:
    """Continues exactly where `checkpoint` was saved, by the objective of `config`. Collective."""
    _load(checkpoint, engine)
    state.restore(checkpoint, data_group)
    _forget_another_phase(checkpoint, config, state)


def roll_back(
    phase: Phase, engine: Engine, state: TrainingState, lineage: Lineage, data_group: Group, world_group: Group
) -> Path | None:
    """Restores weights and counters of what was learned from the newest sound checkpoint of `lineage`; reading goes on
    with the next samples.

    Returns the checkpoint's folder; None where there is none that `phase` went on from: nothing changes. Collective.
    """
    checkpoint, damage = newest_sound(lineage.root, world_group, up_to=lineage.tip)
    if checkpoint is None:
        _refuse_damaged(lineage.root, damage)
    if checkpoint is None or checkpoint.step < phase.steps.start:
        return None
    _load(checkpoint, engine)
    state.roll_back_to(checkpoint, data_group)
    _forget_another_phase(checkpoint, phase.config, state)
    lineage.tip = checkpoint.step
    return checkpoint.folder


def _load(checkpoint: Checkpoint, engine: Engine) -> None:
    engine.load(WithNewHead(checkpoint), checkpoint.state_value("optimizer_steps", int))
    engine.loss_scale.restore(checkpoint.state_value("scale", dict, absent={}))


def _forget_another_phase(checkpoint: Checkpoint, config: RunConfig, state: TrainingState) -> None:
    """Another phase's losses say nothing about spikes of this one's; nor do next tokens, counted as targets, say how
    often masked ones are targets."""
    saved = config_of(checkpoint)
    if not learn_alike(saved, config):
        state.recent_losses.clear()
    if saved.model.is_causal != config.model.is_causal:
        state.forget_targets()
