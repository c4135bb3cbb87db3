"""A run from its checkpoints: resumed, taken back, or taken as another run's starting point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megahead.checkpoint import Checkpoint, find_checkpoint, newest_sound, open_checkpoint, run_on_all_ranks
from megahead.config import RunConfig, resolve_group
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.errors import CheckpointError
from megahead.pretraining import first_weights, weight_shapes
from megahead.train.state import TrainingState


def find_resume(resume: str, folder: Path, world: Group) -> tuple[Checkpoint | None, list[str]]:
    """What `choose_resume` says, opened."""
    found, damage = choose_resume(resume, folder, world)
    return (None if found is None else open_checkpoint(found)), damage


def choose_resume(resume: str, folder: Path, world: Group) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume auto|never|DIR` asks for (None: start from the beginning), and a sentence for each
    damaged one that was passed over. Rank 0 of `world` decides for all; nothing is written. Collective."""
    chosen = run_on_all_ranks(world, lambda: _choose(resume, folder) if world.rank == 0 else None, str)[0]
    return (None, []) if chosen is None else chosen


def _choose(resume: str, folder: Path) -> tuple[Path | None, list[str]]:
    if resume == "auto":
        checkpoint, damage = newest_sound(folder)
        if checkpoint is None and damage:
            raise CheckpointError(
                f"{folder} must hold a sound checkpoint to resume, but holds {len(damage)} damaged only; "
                f"remove them to start anew: {' '.join(damage)}"
            )
        return (None if checkpoint is None else checkpoint.folder), damage
    there = find_checkpoint(folder if resume == "never" else Path(resume))
    if resume == "never" and there is not None:
        raise CheckpointError(
            f"`--resume never` must meet an output folder without checkpoints, but {folder} has {there.name}; "
            "choose another output_dir, or remove it."
        )
    if resume != "never" and there is None:
        raise CheckpointError(f"`--resume` must be auto, never or a checkpoint folder, but {resume} holds none.")
    return there, []


def agreed_group(config: RunConfig, data_ranks: int, checkpoint: Checkpoint | None) -> int:
    """Samples that share candidates: what the run began with, else what its config comes to on these ranks."""
    stored = None if checkpoint is None else checkpoint.stated("group_samples", int)
    return resolve_group(config.objective, config.batch, data_ranks, stored)


def resume_from(checkpoint: Checkpoint, engine: Engine, state: TrainingState, data: Group) -> None:
    """Continues exactly where `checkpoint` was saved. Collective."""
    _load(checkpoint, engine)
    state.restore(checkpoint, data)


def roll_back(engine: Engine, state: TrainingState, folder: Path, data: Group, world: Group) -> Path | None:
    """Takes back what was learned since the newest sound checkpoint of `folder`, but not the reading: the next rows are
    new ones. The checkpoint's folder, or None where there is none. Collective."""
    checkpoint, _ = find_resume("auto", folder, world)
    if checkpoint is None:
        return None
    _load(checkpoint, engine)
    state.go_back(checkpoint, data)
    return checkpoint.folder


def _load(checkpoint: Checkpoint, engine: Engine) -> None:
    engine.load(checkpoint.read, checkpoint.stated("optimizer_steps", int))
    engine.set_loss_scale_state(checkpoint.stated("scale", dict, absent={}))


def starting_weights(config: RunConfig) -> Callable[[str], Tensor]:
    """From a parameter's name to the whole tensor a run starts from: random, or as `init` says from a checkpoint.

    A head to be fine-tuned starts as a copy of the embedding.
    """
    init = config.init
    if init is None:
        return first_weights(config)
    path = find_checkpoint(Path(init.from_checkpoint))
    if path is None:
        raise CheckpointError(f"`init.from_checkpoint` must hold a checkpoint, but {init.from_checkpoint} holds none.")
    checkpoint, shapes = open_checkpoint(path), weight_shapes(config)
    head_from_embedding = init.mode != "continue"

    def weight(name: str) -> Tensor:
        source = "backbone.embedding.weight" if head_from_embedding and name == "head.weight" else name
        return _matching(checkpoint, f"weight/{source}", shapes[name])

    return weight


def _matching(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    if name not in checkpoint.names():
        raise CheckpointError(
            f"{checkpoint.folder} must hold {name}, but does not; is it of another model or objective?"
        )
    tensor = checkpoint.read(name)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{checkpoint.folder} must hold {name} of shape {tuple(shape)}, but has {tuple(tensor.shape)} "
            "instead; give `model` the sizes of that run."
        )
    return tensor
