"""What a run does with checkpoints: resumes from one, rolls back to one, or starts from another run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megahead.checkpoint import (
    Checkpoint,
    abandoned_in,
    find_checkpoint,
    newest_sound,
    open_together,
    run_on_all_ranks,
)
from megahead.config import InitConfig, Phase, RunConfig, RunPlan
from megahead.convert import PublishedModel
from megahead.convert.source import EMBEDDING, HEAD, OUTPUT_BIAS
from megahead.distributed import Group, Renamed, Tensors
from megahead.engine import Engine
from megahead.errors import CheckpointError, ConfigError
from megahead.pretraining import TEMPERATURE, FirstWeights, first_weights, weight_shapes
from megahead.run_folder import RunFolder
from megahead.train.birth import WithNewHead, has_new_head
from megahead.train.lineage import Lineage
from megahead.train.state import TrainingState


def find_resume(resume: str, folder: RunFolder, world_group: Group) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that `--resume auto|never|DIR` asks for (None: start from the beginning), every byte verified, and
    one sentence for each newer but damaged one. Writes nothing. Collective."""
    if resume == "auto":
        checkpoint, damage = _newest_sound(folder.path, world_group)
        if checkpoint is None:
            run_on_all_ranks(world_group, lambda: _refuse_abandoned(folder) if world_group.rank == 0 else None)
        return checkpoint, damage
    named = run_on_all_ranks(world_group, lambda: _named(resume, folder) if world_group.rank == 0 else None)[0]
    return (None if named is None else open_together(named, world_group)), []


def _newest_sound(folder: Path, world_group: Group, up_to: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    checkpoint, damage = newest_sound(folder, world_group, up_to=up_to)
    if checkpoint is None and damage:
        raise CheckpointError(
            f"{folder} must hold a sound checkpoint to resume, but holds only damaged ones ({len(damage)}); "
            f"remove them to start again: {' '.join(damage)}"
        )
    return checkpoint, damage


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
    _forget_other_losses(checkpoint, config, state)


def roll_back(
    phase: Phase, engine: Engine, state: TrainingState, lineage: Lineage, data_group: Group, world_group: Group
) -> Path | None:
    """Restores weights and counters of what was learned from the newest sound checkpoint of `lineage`; reading goes on
    with the next samples.

    Returns the checkpoint's folder; None where there is none that `phase` went on from: nothing changes. Collective.
    """
    checkpoint, _ = _newest_sound(lineage.root, world_group, up_to=lineage.tip)
    if checkpoint is None or checkpoint.step < phase.steps.start:
        return None
    _load(checkpoint, engine)
    state.roll_back_to(checkpoint, data_group)
    _forget_other_losses(checkpoint, phase.config, state)
    lineage.tip = checkpoint.step
    return checkpoint.folder


def _load(checkpoint: Checkpoint, engine: Engine) -> None:
    engine.load(WithNewHead(checkpoint), checkpoint.state_value("optimizer_steps", int))
    engine.set_loss_scale_state(checkpoint.state_value("scale", dict, absent={}))


def _forget_other_losses(checkpoint: Checkpoint, config: RunConfig, state: TrainingState) -> None:
    """Another objective's losses say nothing about spikes of this one's."""
    if has_new_head(checkpoint, config):
        state.recent_losses.clear()


def starting_weights(config: RunConfig, world_group: Group, resumed: Checkpoint | None = None) -> Tensors:
    """The full (unsharded) tensors that a session starts from, under the names of its parameters; none is read yet.

    They come from the checkpoint that is resumed; in a new run they are random, or from what `init` names, which is
    not needed when the run is resumed. A head to be fine-tuned starts as a copy of the embedding. Collective;
    CheckpointError for a checkpoint of another model.
    """
    init, shapes = config.init, weight_shapes(config)
    if resumed is not None:  # rows as they lie there: `resume_from` says how stale they are
        return _weights_of(resumed, shapes, stored="late/weight", born=(HEAD, OUTPUT_BIAS))
    if init is None:
        return first_weights(config)
    copies = {HEAD: EMBEDDING} if init.copies_embedding() else {}
    needed = {name: shape for name, shape in shapes.items() if name not in copies}
    source: Tensors = (
        _published(config, init, world_group)
        if init.from_checkpoint is None
        else _weights_of(_source(init.from_checkpoint, world_group), needed)
    )
    return Renamed(source, lambda name: copies.get(name, name))


def _source(path: str, world_group: Group) -> Checkpoint:
    """The checkpoint at `init.from_checkpoint`."""

    def find() -> Path | None:
        return find_checkpoint(Path(path)) if world_group.rank == 0 else None

    found = run_on_all_ranks(world_group, find)[0]
    if found is None:
        raise CheckpointError(f"`init.from_checkpoint` must hold a checkpoint, but {path} holds none.")
    return open_together(found, world_group)


def _weights_of(
    checkpoint: Checkpoint,
    shapes: Mapping[str, torch.Size],
    stored: str = "weight",
    born: tuple[str, ...] = (OUTPUT_BIAS,),
) -> Tensors:
    """Its parameters, which must have these shapes; `stored`: what their names begin with there. Those of a head that
    are `born` need not be there."""
    there = set(checkpoint.names())
    for parameter, shape in shapes.items():
        name = f"weight/{parameter}"
        if name not in there and parameter in born:
            continue
        if name not in there:
            raise CheckpointError(
                f"{checkpoint.folder} must hold {name}, but does not; is it of another model or objective?"
            )
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{checkpoint.folder} must hold {name} of shape {tuple(shape)}, but has {checkpoint.shape(name)} "
                "instead; give `model` the sizes of that run."
            )
    return Renamed(WithNewHead(checkpoint), lambda name: f"{stored}/{name}")


_OURS_ALONE = (TEMPERATURE, OUTPUT_BIAS)


@dataclass(frozen=True)
class _PublishedWeights:
    """Those of a Hugging Face folder; what it cannot have, a temperature or a bias alone, starts as in a new run."""

    model: PublishedModel
    first: FirstWeights

    def read(self, name: str, /) -> Tensor:
        return self.first.read(name) if name in _OURS_ALONE else self.model.weight(name, self.first.shapes[name])

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return self.first.blocks(name) if name in _OURS_ALONE else self.model.blocks(name, self.first.shapes[name])


def _published(config: RunConfig, init: InitConfig, world_group: Group) -> _PublishedWeights:
    """Reads the folder at `init.from_hf`, which must be of a model that computes what `config.model` does."""
    path, objective = Path(init.from_hf or ""), config.objective

    def check() -> None:
        if not path.is_dir():
            raise CheckpointError(f"`init.from_hf` must be a Hugging Face folder, but {path} is none.")
        there = PublishedModel.open(path)
        there.refuse_another_shape(config.model)
        if objective.name == "vanilla" and not init.copies_embedding() and objective.tied != there.is_tied():
            rule = f"be {str(there.is_tied()).lower()}, as in {path}"
            raise ConfigError("objective.tied", rule, got=str(objective.tied).lower())

    run_on_all_ranks(world_group, check)
    return _PublishedWeights(PublishedModel.open(path), first_weights(config))
