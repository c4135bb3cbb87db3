"""A run in its checkpoints: saved, resumed, or taken as another run's starting point."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megahead.checkpoint import Checkpoint, find_checkpoint, open_checkpoint, save_checkpoint
from megahead.config import RunConfig, config_from_dict, resolve_group
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.errors import CheckpointError
from megahead.pretraining import first_weights, weight_shapes
from megahead.train.state import TrainingState

_SAME_WHEN_RESUMED = (
    "seed",
    "model",
    "objective",
    "batch.global_size",
    "data.train",
    "data.blend_temperature",
    "data.order",
    "data.pack",
    "data.documents_a_row",
    "data.sequence_length",
    "data.end_token",
    "data.isolate_documents",
    "data.boundary_targets",
)


def save(engine: Engine, state: TrainingState, config: RunConfig, data: Group, world: Group) -> Path:
    """Writes a checkpoint of the whole run into its folder. Collective over `world`."""
    counts = {"state/target_counts": state.target_counts(data), "state/dataset_counts": state.dataset_counts}
    return save_checkpoint(
        Path(config.folder()) / "checkpoints",
        state.step,
        chain(engine.tensors(), counts.items()),
        state=state.counters() | {"optimizer_steps": engine.optimizer_steps},
        config=config.model_dump(mode="json"),
        group=world,
        keep=config.training.keep_checkpoints,
    )


def find_resume(resume: str, folder: Path) -> Checkpoint | None:
    """The checkpoint that `--resume auto|never|DIR` asks for, opened; None to start from the beginning."""
    there = find_checkpoint(folder)
    if resume == "never":
        if there is not None:
            raise CheckpointError(
                f"`--resume never` must meet an output folder without checkpoints, but {folder} has {there.name}; "
                "choose another output_dir, or remove it."
            )
        return None
    if resume == "auto":
        return None if there is None else open_checkpoint(there)
    named = find_checkpoint(Path(resume))
    if named is None:
        raise CheckpointError(f"`--resume` must be auto, never or a checkpoint folder, but {resume} holds none.")
    return open_checkpoint(named)


def agreed_group(config: RunConfig, data_ranks: int, checkpoint: Checkpoint | None) -> int:
    """Samples that share candidates: what the run began with, else what its config comes to on these ranks."""
    stored = None if checkpoint is None else checkpoint.state["group_samples"]
    return resolve_group(config.objective, config.batch, data_ranks, stored)


def resume_from(checkpoint: Checkpoint, engine: Engine, state: TrainingState, config: RunConfig, data: Group) -> None:
    """Continues exactly where `checkpoint` was saved; refused when it belongs to a run that computes something else."""
    _refuse_another_run(checkpoint, config)
    engine.load(checkpoint.read, checkpoint.state["optimizer_steps"])
    state.restore(checkpoint.state, checkpoint.read("state/target_counts"), data)


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


def _refuse_another_run(checkpoint: Checkpoint, config: RunConfig) -> None:
    """One sentence with every setting that decides what is computed and differs."""
    before = config_from_dict(checkpoint.config, source=f"the configuration in {checkpoint.folder}")
    ours, theirs = config.model_dump(mode="json"), before.model_dump(mode="json")
    for tree in (ours, theirs):
        del tree["objective"]["group_samples"]  # `agreed_group` compares what it came to
    differing = []
    for field in _SAME_WHEN_RESUMED:
        mine, saved = _at(ours, field), _at(theirs, field)
        if mine != saved:
            differing += _differences(field, saved, mine)
    if differing:
        raise CheckpointError(
            f"{checkpoint.folder} must be of the same run to resume, but differs in {', '.join(differing)}; "
            "set them back, or start another run with init.from_checkpoint."
        )


def _at(tree: object, field: str) -> object:
    for part in field.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _differences(field: str, saved: object, mine: object) -> list[str]:
    if isinstance(saved, dict) and isinstance(mine, dict):
        keys = [key for key in {**saved, **mine} if saved.get(key) != mine.get(key)]
        return [f"{field}.{key} (was {saved.get(key)}, is {mine.get(key)})" for key in keys]
    return [f"{field} (was {saved}, is {mine})"]
