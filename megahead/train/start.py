"""What a session goes on from: a checkpoint, other weights, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.checkpoints.disk import find_checkpoint, orphaned_in
from megahead.checkpoints.fetch import fetch_named
from megahead.checkpoints.format import run_on_all_ranks, run_on_first_rank
from megahead.checkpoints.reading import Checkpoint, Resumed, newest_valid, open_together
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.config.training import InitConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FiniteTensors, RoutedTensors, TensorSource
from megahead.errors import CheckpointError, ConfigError
from megahead.hf.published import PublishedModel
from megahead.hf.trained import EMBEDDING, HEAD, OUTPUT_BIAS, TrainedModel
from megahead.objectives.pretraining import TEMPERATURE, InitialWeights, initial_weights, weight_shapes
from megahead.optim import learning_rate_ratio
from megahead.remote_files import is_remote
from megahead.run_folder import RunFolder
from megahead.train.datasets import is_from_another_phase, saved_config
from megahead.wording import pluralize


@dataclass(frozen=True)
class ResumePoint:
    """What a session, or its next phase, goes on from."""

    checkpoint: Checkpoint | None
    """Every byte verified; None: from the beginning."""

    damage: list[str]
    """A sentence for each newer but damaged checkpoint."""

    elsewhere: Sequence[Resumed] = ()
    """Where other places than the disk had newer ones, what came of them: perhaps this checkpoint."""

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

    def starts_phase(self, config: RunConfig) -> bool:
        """Whether the phase of `config` begins here, with what another one has left."""
        return self.checkpoint is not None and is_from_another_phase(self.checkpoint, config)

    def banner_lines(self) -> list[tuple[str, str]]:
        """For the banner."""
        lines = [("damaged", message) for message in self.damage]
        lines += [line for found in self.elsewhere for line in found.lines()]
        if self.checkpoint is not None:
            lines.append(("resumed", f"step {self.checkpoint.step:,}, {self.checkpoint.folder}"))
        return lines

    def describe_schedule_change(self, config: RunConfig) -> list[tuple[str, str]]:
        """The banner's line where the learning rate goes on elsewhere than by the settings that the checkpoint was
        saved with, as in a run that is made longer."""
        if self.checkpoint is None or self.step >= config.training.steps:
            return []
        saved = saved_config(self.checkpoint)
        now, before = (self._learning_rate(each) for each in (config, saved))
        if isclose(now, before, rel_tol=1e-6):
            return []
        place = f"at step {self.step:,} of {config.training.steps:,}"
        earlier = f"the schedule before, of {pluralize(saved.training.steps, 'step')}, had {before:.2e} there"
        return [("rate now", f"learning rate {now:.2e} {place}; {earlier}")]

    def _learning_rate(self, config: RunConfig) -> float:
        """That of the next step."""
        ratio = learning_rate_ratio(config.schedule, self.step, config.training.steps)
        return config.optimizer.learning_rate * ratio

    def log_fields(self) -> dict[str, Any]:
        """For the log."""
        return {"damaged": self.damage} | {found.place: found.fields() for found in self.elsewhere}

    def came_from(self, place: str) -> bool:
        """Whether the checkpoint was taken from another place than the disk."""
        return any(found.place == place and found.checkpoint is self.checkpoint for found in self.elsewhere)


def find_resume_point(
    resume: str, folder: RunFolder, world_group: Group, elsewhere: Sequence[Callable[[int], Resumed | None]] = ()
) -> ResumePoint:
    """What `--resume auto|never|DIR` asks for. Collective.

    `elsewhere`: other places, for `auto`: each makes a checkpoint in `folder` of what is newer there than a step (-1:
    than nothing). Otherwise nothing is written.
    """
    if resume != "auto":
        named = run_on_first_rank(world_group, lambda: _named(resume, folder))
        return ResumePoint(None if named is None else open_together(named, world_group), [])
    checkpoint, damage = newest_valid(folder.path, world_group)
    newer: list[Resumed] = []
    for look in elsewhere:
        found = look(-1 if checkpoint is None else checkpoint.step)
        newer += [] if found is None else [found]
        checkpoint = (found and found.checkpoint) or checkpoint
    if checkpoint is None:
        lost = [each for found in newer if found.place == "mirror" for each in found.problems]
        refuse_damaged(folder.path, [*damage, *lost])
        run_on_first_rank(world_group, lambda: _refuse_orphaned(folder))
    return ResumePoint(checkpoint, damage, newer)


def refuse_damaged(folder: Path, damage: list[str]) -> None:
    """CheckpointError where nothing but damaged checkpoints was found, with a sentence for each."""
    if damage:
        raise CheckpointError(
            f"{folder} must hold a valid checkpoint to resume, but holds only damaged ones ({len(damage)}); "
            f"remove them to start again: {' '.join(damage)}"
        )


def _refuse_orphaned(folder: RunFolder) -> None:
    orphaned = orphaned_in(folder.path)
    if orphaned:
        raise CheckpointError(
            f"{folder} must hold a checkpoint to resume, but holds only {', '.join(path.name for path in orphaned)}; "
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


# The head that a vanilla softmax starts with after headless training: the training-free head as parameters.
#
# Scores are `E h / T + b`, with the embedding E or a copy of it, and b the training-free head's bias (log q for the
# paper's objective): the first loss of the softmax is the last held-out loss of the headless model.


@dataclass(frozen=True)
class CheckpointWithHead:
    """The tensors of `checkpoint`, all of them finite; where it has no head, also the first values of one, with
    moments of 0."""

    checkpoint: Checkpoint

    def read(self, key: str, /) -> Tensor:
        if self._name_of_new(key) is None:
            return self._saved().read(key)
        return torch.cat(list(self.blocks(key)))

    def blocks(self, key: str, /) -> Iterator[Tensor]:
        name = self._name_of_new(key)
        if name is None:
            return self._saved().blocks(key)
        first = (
            self.checkpoint.blocks(f"weight/{EMBEDDING}")
            if name == HEAD
            else iter([initial_output_bias(self.checkpoint)])
        )
        return first if key.endswith(f"weight/{name}") else (torch.zeros_like(block) for block in first)

    def _saved(self) -> FiniteTensors:
        return FiniteTensors(self.checkpoint, self.checkpoint.folder)

    def _name_of_new(self, key: str) -> str | None:
        """The parameter that `key` is of, if it is in a head that the checkpoint lacks."""
        name = next((name for name in (HEAD, OUTPUT_BIAS) if key.endswith(f"/{name}")), None)
        return None if name is None or f"weight/{name}" in self.checkpoint.names() else name


def initial_output_bias(checkpoint: Checkpoint) -> Tensor:
    """[padded vocabulary]: that of the training-free head; zeros if the model in `checkpoint` needs none."""
    model = TrainedModel.from_checkpoint(checkpoint)
    bias_V = model.training_free_bias()
    return F.pad(bias_V, (0, model.config.model.padded_vocab_size() - len(bias_V)))


_NOT_PUBLISHED = (TEMPERATURE, OUTPUT_BIAS)
"""Parameters that a Hugging Face folder cannot have: they start as in a new run."""


def starting_weights(config: RunConfig, world_group: Group, resumed: Checkpoint | None = None) -> TensorSource:
    """The full (unsharded) tensors that a session starts from, under the names of its parameters; none is read yet.

    They come from the checkpoint that is resumed; in a new run they are random, or from what `init` names, which is
    not needed when the run is resumed. A head to be fine-tuned starts as a copy of the embedding; a bias that a
    checkpoint lacks, as the training-free head's. Collective; CheckpointError for a checkpoint of another model.
    """
    init, shapes = config.init, weight_shapes(config)
    if resumed is not None:  # rows without the updates they wait for: `resume_from` does those
        return _weights_of(resumed, shapes, kind="late/weight", may_lack=(HEAD, OUTPUT_BIAS))
    if init is None:
        return initial_weights(config)
    copies = {HEAD: EMBEDDING} if init.copies_embedding() else {}
    needed = {name: shape for name, shape in shapes.items() if name not in copies}
    source: TensorSource = (
        _published(config, init, world_group)
        if init.from_checkpoint is None
        else _begun_from(_source(init.from_checkpoint, config.folder(), world_group), config, needed)
    )
    return RoutedTensors(lambda name: (source, copies.get(name, name)))


def _begun_from(checkpoint: Checkpoint, config: RunConfig, shapes: Mapping[str, torch.Size]) -> TensorSource:
    """Its parameters; a temperature that it did not learn starts as in a new run."""
    if TEMPERATURE not in shapes or f"weight/{TEMPERATURE}" in checkpoint.names():
        return _weights_of(checkpoint, shapes)
    others = _weights_of(checkpoint, {name: shape for name, shape in shapes.items() if name != TEMPERATURE})
    first = initial_weights(config)
    return RoutedTensors(lambda name: (first if name == TEMPERATURE else others, name))


def _source(path: str, folder: RunFolder, world_group: Group) -> Checkpoint:
    """The checkpoint at `init.from_checkpoint`, fetched into the run's `folder` if that is a URL."""
    if is_remote(path):
        return open_together(fetch_named(path, RunFolder(folder.fetched_checkpoints), world_group), world_group)
    found = run_on_first_rank(world_group, lambda: find_checkpoint(Path(path)))
    if found is None:
        raise CheckpointError(f"`init.from_checkpoint` must hold a checkpoint, but {path} holds none.")
    return open_together(found, world_group)


def _weights_of(
    checkpoint: Checkpoint,
    shapes: Mapping[str, torch.Size],
    kind: str = "weight",
    may_lack: tuple[str, ...] = (OUTPUT_BIAS,),
) -> TensorSource:
    """Its parameters, which must have these shapes; `kind`: what their names begin with there. Those of a head that it
    `may_lack` then start as the training-free head's."""
    there = set(checkpoint.names())
    for parameter, shape in shapes.items():
        name = f"weight/{parameter}"
        if name not in there and parameter in may_lack:
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
    source = CheckpointWithHead(checkpoint)
    return RoutedTensors(lambda name: (source, f"{kind}/{name}"))


@dataclass(frozen=True)
class _PublishedWeights:
    """Those of a Hugging Face folder, and `first` for what it cannot have."""

    model: PublishedModel
    first: InitialWeights

    def read(self, name: str, /) -> Tensor:
        return self.first.read(name) if name in _NOT_PUBLISHED else self.model.weight(name, self.first.shapes[name])

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return self.first.blocks(name) if name in _NOT_PUBLISHED else self.model.blocks(name, self.first.shapes[name])


def _published(config: RunConfig, init: InitConfig, world_group: Group) -> _PublishedWeights:
    """Reads the folder at `init.from_hf`, which must be of a model that computes what `config.model` does."""
    path, objective = Path(init.from_hf or ""), config.objective

    def check() -> None:
        if not path.is_dir():
            raise CheckpointError(f"`init.from_hf` must be a Hugging Face folder, but {path} is none.")
        there = PublishedModel.open(path)
        there.require_same_architecture(config.model)
        if objective.name == "vanilla" and not init.copies_embedding() and objective.tied != there.is_tied():
            rule = f"be {str(there.is_tied()).lower()}, as in {path}"
            raise ConfigError("objective.tied", rule, got=str(objective.tied).lower())

    run_on_all_ranks(world_group, check)
    return _PublishedWeights(PublishedModel.open(path), initial_weights(config))
