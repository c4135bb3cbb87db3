"""The weights that a session starts from: a checkpoint's, those that `init` names, or random ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megahead.checkpoint import Checkpoint, find_checkpoint, open_together, run_on_all_ranks
from megahead.config import InitConfig, RunConfig
from megahead.convert import PublishedModel
from megahead.convert.source import EMBEDDING, HEAD, OUTPUT_BIAS
from megahead.distributed import Group, Renamed, Tensors
from megahead.errors import CheckpointError, ConfigError
from megahead.far import is_far
from megahead.mirror import fetch_named
from megahead.pretraining import TEMPERATURE, FirstWeights, first_weights, weight_shapes
from megahead.run_folder import RunFolder
from megahead.train.birth import WithNewHead

_NOT_PUBLISHED = (TEMPERATURE, OUTPUT_BIAS)
"""Parameters that a Hugging Face folder cannot have: they start as in a new run."""


def starting_weights(config: RunConfig, world_group: Group, resumed: Checkpoint | None = None) -> Tensors:
    """The full (unsharded) tensors that a session starts from, under the names of its parameters; none is read yet.

    They come from the checkpoint that is resumed; in a new run they are random, or from what `init` names, which is
    not needed when the run is resumed. A head to be fine-tuned starts as a copy of the embedding; a bias that a
    checkpoint lacks, as the training-free head's. Collective; CheckpointError for a checkpoint of another model.
    """
    init, shapes = config.init, weight_shapes(config)
    if resumed is not None:  # rows without the updates they wait for: `resume_from` does those
        return _weights_of(resumed, shapes, kind="late/weight", may_lack=(HEAD, OUTPUT_BIAS))
    if init is None:
        return first_weights(config)
    copies = {HEAD: EMBEDDING} if init.copies_embedding() else {}
    needed = {name: shape for name, shape in shapes.items() if name not in copies}
    source: Tensors = (
        _published(config, init, world_group)
        if init.from_checkpoint is None
        else _begun_from(_source(init.from_checkpoint, config.folder(), world_group), config, needed)
    )
    return Renamed(source, lambda name: copies.get(name, name))


def _begun_from(checkpoint: Checkpoint, config: RunConfig, shapes: Mapping[str, torch.Size]) -> Tensors:
    """Its parameters; a temperature that it did not learn starts as in a new run."""
    if TEMPERATURE not in shapes or f"weight/{TEMPERATURE}" in checkpoint.names():
        return _weights_of(checkpoint, shapes)
    others = {name: shape for name, shape in shapes.items() if name != TEMPERATURE}
    return _WithTemperature(_weights_of(checkpoint, others), first_weights(config))


def _source(path: str, folder: RunFolder, world_group: Group) -> Checkpoint:
    """The checkpoint at `init.from_checkpoint`, fetched into the run's `folder` if that is a URL."""
    if is_far(path):
        return open_together(fetch_named(path, RunFolder(folder.fetched), world_group), world_group)

    def find() -> Path | None:
        return find_checkpoint(Path(path)) if world_group.rank == 0 else None

    found = run_on_all_ranks(world_group, find)[0]
    if found is None:
        raise CheckpointError(f"`init.from_checkpoint` must hold a checkpoint, but {path} holds none.")
    return open_together(found, world_group)


def _weights_of(
    checkpoint: Checkpoint,
    shapes: Mapping[str, torch.Size],
    kind: str = "weight",
    may_lack: tuple[str, ...] = (OUTPUT_BIAS,),
) -> Tensors:
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
    return Renamed(WithNewHead(checkpoint), lambda name: f"{kind}/{name}")


@dataclass(frozen=True)
class _WithTemperature:
    """`weights`, and the temperature of `first`."""

    weights: Tensors
    first: FirstWeights

    def read(self, name: str, /) -> Tensor:
        return (self.first if name == TEMPERATURE else self.weights).read(name)

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return (self.first if name == TEMPERATURE else self.weights).blocks(name)


@dataclass(frozen=True)
class _PublishedWeights:
    """Those of a Hugging Face folder, and `first` for what it cannot have."""

    model: PublishedModel
    first: FirstWeights

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
        there.refuse_another_shape(config.model)
        if objective.name == "vanilla" and not init.copies_embedding() and objective.tied != there.is_tied():
            rule = f"be {str(there.is_tied()).lower()}, as in {path}"
            raise ConfigError("objective.tied", rule, got=str(objective.tied).lower())

    run_on_all_ranks(world_group, check)
    return _PublishedWeights(PublishedModel.open(path), first_weights(config))
