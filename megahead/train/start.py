"""What a session, and each of its phases, goes on from: the newest checkpoint that is sound, or one that is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose
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
from megahead.config import RunConfig, RunPlan
from megahead.copies import Rescue
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.mirror import Fetched
from megahead.optim import learning_rate_ratio
from megahead.run_folder import RunFolder
from megahead.train.identity import config_of, is_of_another_phase
from megahead.wording import counted


@dataclass(frozen=True)
class Start:
    """What a session, or its next phase, goes on from."""

    checkpoint: Checkpoint | None
    """Every byte verified; None: from the beginning."""

    damage: list[str]
    """A sentence for each newer but damaged checkpoint."""

    rescue: Rescue | None = None
    """Where there were newer copies in memory, what came of them: perhaps this checkpoint."""

    fetched: Fetched | None = None
    """The same for newer checkpoints in the mirror."""

    @property
    def step(self) -> int:
        """Optimizer steps that were applied until then."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def group_samples(self, plan: RunPlan) -> int:
        """Samples per candidate group (whose targets are candidates for each other): what a resumed run began with, for
        a new run the plan's."""
        return plan.group_samples(
            None if self.checkpoint is None else self.checkpoint.state_value("group_samples", int)
        )

    def begins_phase(self, config: RunConfig) -> bool:
        """Whether the phase of `config` begins here, with what another one has left."""
        return self.checkpoint is not None and is_of_another_phase(self.checkpoint, config)

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

    def new_schedule(self, config: RunConfig) -> list[tuple[str, str]]:
        """The banner's line where the learning rate goes on elsewhere than by the settings that the checkpoint was
        saved with, as in a run that is made longer."""
        if self.checkpoint is None or self.step >= config.training.steps:
            return []
        saved = config_of(self.checkpoint)
        now, before = (self._learning_rate(each) for each in (config, saved))
        if isclose(now, before, rel_tol=1e-6):
            return []
        place = f"at step {self.step:,} of {config.training.steps:,}"
        earlier = f"the schedule before, of {counted(saved.training.steps, 'step')}, had {before:.2e} there"
        return [("rate now", f"learning rate {now:.2e} {place}; {earlier}")]

    def _learning_rate(self, config: RunConfig) -> float:
        """That of the next step."""
        ratio = learning_rate_ratio(config.schedule, self.step, config.training.steps)
        return config.optimizer.learning_rate * ratio

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
        refuse_damaged(folder.path, [*damage, *(fetched.problems if fetched else ())])
        run_on_all_ranks(world_group, lambda: _refuse_abandoned(folder) if world_group.rank == 0 else None)
    return Start(checkpoint, damage, rescued, fetched)


def refuse_damaged(folder: Path, damage: list[str]) -> None:
    """CheckpointError where nothing but damaged checkpoints was found, with a sentence for each."""
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
