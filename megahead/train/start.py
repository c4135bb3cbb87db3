"""The starting point of a session: the checkpoint to resume from, or initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.checkpoints.disk import DiskStorage, find_checkpoint, orphaned_folders
from megahead.checkpoints.format import Manifest, run_on_all_ranks, run_on_first_rank
from megahead.checkpoints.reading import (
    Checkpoint,
    RecoveryResult,
    find_on_first_rank,
    newest_valid,
    open_checkpoint,
    open_verified,
)
from megahead.checkpoints.transfer import fetch_checkpoint
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.config.training import InitConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FiniteTensors, MappedTensors, TensorSource
from megahead.errors import CheckpointError, ConfigError
from megahead.hf.importing import HFModel, require_same_architecture
from megahead.hf.trained import EMBEDDING, HEAD, OUTPUT_BIAS, TrainedModel
from megahead.objectives.auxiliary import auxiliary_class
from megahead.objectives.pretraining import TEMPERATURE, initial_weights, weight_shapes
from megahead.optim import learning_rate_ratio
from megahead.remote_files import is_remote
from megahead.run_folder import RunFolder
from megahead.train.datasets import FINGERPRINTED, is_from_another_phase, require_same_run
from megahead.wording import pluralize


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a session, or one of its phases, resumes from."""

    checkpoint: Checkpoint | None
    """Fully verified; None: a new run."""

    damage: list[str]
    """A sentence for each newer but damaged checkpoint."""

    recovered: Sequence[RecoveryResult] = ()
    """What was found in memory or the remote store; `checkpoint` is the last of these that is usable, if any."""

    @property
    def step(self) -> int:
        """The number of applied optimizer steps."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def group_samples(self, plan: RunPlan) -> int:
        """Samples per candidate group (whose targets are candidates for each other): the checkpoint's, or the plan's
        for a new run."""
        checkpoint = self.checkpoint
        return plan.group_samples(None if checkpoint is None else checkpoint.state_value("group_samples", int))

    def starts_phase(self, config: RunConfig) -> bool:
        """Whether the phase of `config` starts here, with the weights of another phase."""
        return self.checkpoint is not None and is_from_another_phase(self.checkpoint, config)

    def banner_lines(self) -> list[tuple[str, str]]:
        """(name, value) lines that the session prints at its start."""
        lines = [("damaged", message) for message in self.damage]
        lines += [line for result in self.recovered for line in result.lines()]
        if self.checkpoint is not None:
            lines.append(("resumed", f"step {self.checkpoint.step:,}, {self.checkpoint.folder}"))
        return lines

    def describe_schedule_change(self, config: RunConfig) -> list[tuple[str, str]]:
        """The banner's line if the learning rate differs from that of the checkpoint's settings, for example since the
        run was made longer."""
        if self.checkpoint is None or self.step >= config.training.steps:
            return []
        saved = self.checkpoint.run_config()
        rate, saved_rate = self._learning_rate(config), self._learning_rate(saved)
        if isclose(rate, saved_rate, rel_tol=1e-6):
            return []
        position = f"at step {self.step:,} of {config.training.steps:,}"
        earlier = f"the schedule before, of {pluralize(saved.training.steps, 'step')}, had {saved_rate:.2e} there"
        return [("rate now", f"learning rate {rate:.2e} {position}; {earlier}")]

    def _learning_rate(self, config: RunConfig) -> float:
        ratio = learning_rate_ratio(config.schedule, self.step, config.training.steps)
        return config.optimizer.learning_rate * ratio

    def log_fields(self) -> dict[str, Any]:
        return {"damaged": self.damage} | {result.source: result.fields() for result in self.recovered}

    def is_from(self, source: str) -> bool:
        """Whether the checkpoint was recovered from `source`: "memory", or "mirror" (the remote store)."""
        return any(result.source == source and result.checkpoint is self.checkpoint for result in self.recovered)


def has_saved(launch_id: str, folder: RunFolder) -> bool:
    """Whether the launch `launch_id` has saved the newest checkpoint in `folder`. A restart then resumes by `auto`:
    launchers repeat the arguments of the first start."""
    newest = find_checkpoint(folder.path) if launch_id else None
    return newest is not None and Manifest.read(newest).state.get("launch") == launch_id


def check_resumed_settings(config: RunConfig, resume: str) -> bool:
    """For a dry run: whether the run resumes from a checkpoint. CheckpointError if one on this machine was saved with
    other settings; the content of data is not compared."""
    if resume == "never" or is_remote(resume):
        return resume != "never"
    path = find_checkpoint(config.folder().path if resume == "auto" else Path(resume))
    if path is None:
        return False
    checkpoint = open_checkpoint(path)
    if config.engine.precision == "auto":  # a run decides by its device
        engine = config.engine.model_copy(update={"precision": checkpoint.run_config().engine.precision})
        config = config.model_copy(update={"engine": engine})
    unknown = dict.fromkeys(FINGERPRINTED)
    require_same_run(checkpoint, config, checkpoint.state_value("texts", dict, default=unknown))
    return True


def find_resume_point(
    resume: str, folder: RunFolder, world_group: Group, sources: Sequence[Callable[[int], RecoveryResult | None]] = ()
) -> ResumePoint:
    """Finds the checkpoint for `--resume auto|never|DIR`. Collective. `sources`: for `auto`, functions that write a
    checkpoint newer than a step (-1: any) to `folder`, from memory or the remote store."""
    if resume != "auto":
        path = _find_requested(resume, folder, world_group)
        return ResumePoint(None if path is None else open_verified(path, world_group), [])
    checkpoint, damage = newest_valid(folder.path, world_group)
    recovered: list[RecoveryResult] = []
    for recover in sources:
        result = recover(-1 if checkpoint is None else checkpoint.step)
        recovered += [] if result is None else [result]
        checkpoint = (result and result.checkpoint) or checkpoint
    if checkpoint is None:
        unusable = [problem for result in recovered if result.source == "mirror" for problem in result.problems]
        refuse_damaged(folder.path, [*damage, *unusable])
        run_on_first_rank(world_group, lambda: _refuse_orphaned(folder))
    return ResumePoint(checkpoint, damage, recovered)


def refuse_damaged(folder: Path, damage: list[str]) -> None:
    """CheckpointError if there is `damage`, a sentence for each damaged checkpoint; called if none is valid."""
    if damage:
        raise CheckpointError(
            f"{folder} must hold a valid checkpoint to continue from, but holds only damaged ones ({len(damage)}); "
            f"remove them to start again: {' '.join(damage)}"
        )


def _refuse_orphaned(folder: RunFolder) -> None:
    """CheckpointError if `folder` has checkpoints outside of its history (neither its newest one nor an ancestor of
    it)."""
    orphaned = orphaned_folders(folder.path)
    if orphaned:
        raise CheckpointError(
            f"{folder} must hold a checkpoint to resume, but holds only {', '.join(path.name for path in orphaned)}; "
            "name the one to continue from with --resume, or start again with --resume never."
        )


def _find_requested(resume: str, folder: RunFolder, world_group: Group) -> Path | None:
    """The checkpoint folder for `never` (None) or DIR, where DIR may be a link to one of the run's own; CheckpointError
    if it does not fit. Collective."""
    path = find_on_first_rank(folder.path if resume == "never" else Path(resume), world_group)
    if resume == "never" and path is not None:
        raise CheckpointError(
            f"`--resume never` needs an output folder without checkpoints, but {folder} has {path.name}; "
            "choose another output_dir, or remove that checkpoint."
        )
    if resume != "never" and path is None:
        raise CheckpointError(f"`--resume` must be auto, never or a checkpoint folder, but {resume} holds none.")
    disk = DiskStorage(folder.checkpoints)

    def find_own() -> str | None:
        target = None if path is None else path.resolve()
        return next((name for name in disk.names() if (disk.root / name).resolve() == target), None)

    own = run_on_first_rank(world_group, find_own)
    return path if own is None else disk.root / own


# The initial head of a vanilla softmax after headless training: the training-free head as parameters.
#
# Scores are `E h / T + b`, with the embedding E or a copy of it, and b the training-free head's bias (log q for the
# paper's objective), so that the initial loss of the softmax is the last held-out loss of the headless model.


@dataclass(frozen=True)
class WithInitialHead:
    """The tensors of `checkpoint`, which must be finite. If it has no head, also an initial one, with optimizer moments
    of 0."""

    checkpoint: Checkpoint

    def read(self, key: str, /) -> Tensor:
        if self._missing_parameter(key) is None:
            return self._saved().read(key)
        return torch.cat(list(self.blocks(key)))

    def blocks(self, key: str, /) -> Iterator[Tensor]:
        name = self._missing_parameter(key)
        if name is None:
            return self._saved().blocks(key)
        if name == HEAD:
            weight = self.checkpoint.blocks(f"weight/{EMBEDDING}")
        else:  # the training-free head's bias, zeros if the model needs none; zeros also for the padding
            model = TrainedModel.from_checkpoint(self.checkpoint)
            bias_V = model.training_free_bias()
            weight = iter([F.pad(bias_V, (0, model.config.model.padded_vocab_size() - len(bias_V)))])
        return weight if key.endswith(f"weight/{name}") else (torch.zeros_like(block) for block in weight)

    def _saved(self) -> FiniteTensors:
        return FiniteTensors(self.checkpoint, self.checkpoint.folder)

    def _missing_parameter(self, key: str) -> str | None:
        """The head's parameter in `key`, if the checkpoint lacks it."""
        name = next((name for name in (HEAD, OUTPUT_BIAS) if key.endswith(f"/{name}")), None)
        return None if name is None or f"weight/{name}" in self.checkpoint.names() else name


def starting_weights(config: RunConfig, world_group: Group, resumed: Checkpoint | None = None) -> TensorSource:
    """The full (unsharded) initial tensors of a session by parameter name, which are read only when needed.

    They come from the `resumed` checkpoint; for a new run from `init`, or they are random. A head that `init`
    fine-tunes starts as a copy of the embedding where there is none; a bias that a checkpoint lacks starts as the
    training-free head's. Collective; CheckpointError or ConfigError for a checkpoint of another model.
    """
    if resumed is not None:
        # `late/weight`: rows to which updates are still to be applied (see
        # checkpoints/reading.py); Progress.resume_from restores the optimizer
        shapes = weight_shapes(config)
        return _checkpoint_weights(resumed, shapes, prefix="late/weight", optional=(HEAD, OUTPUT_BIAS))
    if config.init is None:
        return initial_weights(config)
    load = _hf_weights if config.init.from_checkpoint is None else _init_weights
    return load(config, config.init, world_group)


def _init_weights(config: RunConfig, init: InitConfig, world_group: Group) -> TensorSource:
    """The weights of `init.from_checkpoint`; parameters of a temperature or auxiliary objective that it lacks start as
    in a new run. Its run may have had another context, and hence other rotary frequencies."""
    checkpoint = _open_init(init.from_checkpoint or "", config.folder(), world_group)
    saved, prefixes = set(checkpoint.names()), (TEMPERATURE, *_auxiliary_prefixes(config))
    copies = _copies(init, has_head=f"weight/{HEAD}" in saved)
    shapes = {name: shape for name, shape in weight_shapes(config).items() if name not in copies}
    new = {name for name in shapes if name.startswith(prefixes) and f"weight/{name}" not in saved}
    weights = _checkpoint_weights(checkpoint, {name: shape for name, shape in shapes.items() if name not in new})
    free = ("vocab_size", "rotary_base", "rotary_scaling")
    require_same_architecture(config.model, checkpoint.run_config().model, checkpoint.folder, free)
    new_weights = initial_weights(config)
    return MappedTensors(lambda name: (new_weights if name in new else weights, copies.get(name, name)))


def _copies(init: InitConfig, *, has_head: bool) -> dict[str, str]:
    """{parameter: which one it starts as a copy of}"""
    return {HEAD: EMBEDDING} if init.copies_embedding() and not has_head else {}


def _auxiliary_prefixes(config: RunConfig) -> tuple[str, ...]:
    """The prefixes of an auxiliary objective's parameter names; none without one."""
    settings = config.objective.auxiliary()
    return () if settings is None else (f"{auxiliary_class(settings).module_name}.",)


def _open_init(path: str, folder: RunFolder, world_group: Group) -> Checkpoint:
    """Opens the checkpoint at `init.from_checkpoint`, fetched to the run's `folder` if it is a URL."""
    if is_remote(path):
        return open_verified(fetch_checkpoint(path, RunFolder(folder.fetched_checkpoints), world_group), world_group)
    local = find_on_first_rank(Path(path), world_group)
    if local is None:
        raise CheckpointError(f"`init.from_checkpoint` must hold a checkpoint, but {path} holds none.")
    return open_verified(local, world_group)


def _checkpoint_weights(
    checkpoint: Checkpoint,
    shapes: Mapping[str, torch.Size],
    prefix: str = "weight",
    optional: tuple[str, ...] = (OUTPUT_BIAS,),
) -> TensorSource:
    """The checkpoint's tensors `prefix/NAME`; CheckpointError if their `shapes` differ or one is missing. `optional`
    parameters of a head that are missing start as the training-free head's."""
    names = set(checkpoint.names())
    for parameter, shape in shapes.items():
        name = f"weight/{parameter}"
        if name not in names and parameter in optional:
            continue
        if name not in names:
            fix = " A decoder's `init.mode: finetune` copies the embedding to it." if parameter == HEAD else ""
            raise CheckpointError(
                f"{checkpoint.folder} must hold {name}, but does not; is it of another model or objective?{fix}"
            )
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{checkpoint.folder} must hold {name} of shape {tuple(shape)}, but has {checkpoint.shape(name)} "
                "instead; give `model` the sizes of that run."
            )
    source = WithInitialHead(checkpoint)
    return MappedTensors(lambda name: (source, f"{prefix}/{name}"))


@dataclass(frozen=True)
class _HFWeights:
    """The weights of a Hugging Face folder, as parameters of these shapes."""

    model: HFModel
    shapes: Mapping[str, torch.Size]

    def read(self, name: str, /) -> Tensor:
        return self.model.weight(name, self.shapes[name])

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return self.model.blocks(name, self.shapes[name])


def _hf_weights(config: RunConfig, init: InitConfig, world_group: Group) -> TensorSource:
    """The weights in the folder `init.from_hf`; parameters that such a folder cannot have start as in a new run.
    CheckpointError if its model differs from `config.model`."""
    path, objective = Path(init.from_hf or ""), config.objective

    def check() -> None:
        if not path.is_dir():
            raise CheckpointError(f"`init.from_hf` must be a Hugging Face folder, but {path} is none.")
        model = HFModel.open(path)
        model.require_same_architecture(config.model)
        if objective.name == "vanilla" and not init.copies_embedding() and objective.tied != model.is_tied():
            rule = f"be {str(model.is_tied()).lower()}, as in {path}"
            raise ConfigError("objective.tied", rule, got=str(objective.tied).lower())

    run_on_all_ranks(world_group, check)
    new_prefixes, new_weights = (TEMPERATURE, OUTPUT_BIAS, *_auxiliary_prefixes(config)), initial_weights(config)
    weights = _HFWeights(HFModel.open(path), new_weights.shapes)
    copies = _copies(init, has_head=HEAD in weights.model.slices)
    return MappedTensors(
        lambda name: (new_weights if name.startswith(new_prefixes) else weights, copies.get(name, name))
    )
