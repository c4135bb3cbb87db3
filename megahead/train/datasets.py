"""The datasets a run reads: opened and checked before anything else starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.checkpoint import run_long_on_all_ranks, run_on_all_ranks
from megahead.config import DataConfig, RunConfig
from megahead.corpus import IndexedDataset, Tokenizer
from megahead.corpus.dataset_info import require_one_tokenizer
from megahead.corpus.far_dataset import fetch_dataset
from megahead.data import training_samples
from megahead.data.blending import Blend
from megahead.data.end_tokens import require_end_tokens, without_boundaries
from megahead.data.nearest_ids import open_nearest_ids
from megahead.data.samples import Samples
from megahead.data.sampling import describe_samples, token_counts
from megahead.data.strategies import TrainingText, Weights
from megahead.distributed import Group
from megahead.errors import CheckpointError, ConfigError, DataError, UserError
from megahead.far import near_file
from megahead.train.preflight import check_late_files


@dataclass(frozen=True)
class RunDatasets:
    """Training datasets in the config's order, the samples drawn from them, and the held-out dataset."""

    train: Sequence[IndexedDataset]
    samples: Samples | Blend

    token_counts: Tensor
    """int64 [padded vocabulary]: how often each id occurs in the text that samples are drawn from (`data.sampling`)."""

    validation: IndexedDataset | None

    nearest_ids: Tensor | None = None
    """int64 [V, K]: each id's nearest ids, where the config names a file of them."""

    def describe(self, config: RunConfig) -> list[tuple[str, str]]:
        """Lines of the banner: epochs, shares of a blend, and datasets whose documents can attend to each other."""
        end = config.data.end_token
        apart = [
            ("documents", f"{dataset.prefix}: not kept apart, no row that was checked has an end token ({end})")
            for dataset in self.train
            if without_boundaries(config.data, dataset)
        ]
        unknown = [str(each.prefix) for each in self.train if each.cut_by() is None]
        if unknown and config.data.tokenizer is not None:
            apart.append(("tokenizer", f"not compared with {', '.join(unknown)}: not known there which one cut it"))
        return describe_samples(self.samples, config.training.steps * config.batch.global_size) + apart


def open_datasets(config: RunConfig, world_group: Group | None = None) -> RunDatasets:
    """Opens what the run reads: on rank 0 of `world_group` first, which packs rows if necessary, then on the others.
    What is far is fetched before, once on each machine.

    UserError on all ranks if on any rank a dataset is missing, too short, or of another vocabulary or end token, or the
    tokenizer, a file of ids or one of a task cannot be the run's.
    Collective; packing must end within the group's timeout.
    """
    opened: list[RunDatasets] = []
    group = world_group or Group()

    def open_here() -> None:
        if group.rank == 0:
            check_late_files(config)
        opened.append(_opened(config))

    run_long_on_all_ranks(group, _fetch_far(config.data), _sentence)
    for turn in (group.rank == 0, group.rank > 0):
        try:
            run_on_all_ranks(group, open_here if turn else _nothing, _sentence)
        except CheckpointError as error:
            raise error.__cause__ or DataError(str(error)) from None  # the cause exists on the rank that failed
    return opened[0]


def _fetch_far(data: DataConfig) -> Iterator[None]:
    """Fetches datasets that are named by a URL, so that opening them is quick; yields often."""
    for prefix in [*(part.prefix for part in data.parts()), data.validation]:
        if prefix is not None:
            yield from fetch_dataset(prefix)


def _opened(config: RunConfig) -> RunDatasets:
    train = [_open(config, part.prefix, "data.train") for part in config.data.parts()]
    prefix = config.data.validation
    validation = None if prefix is None else _open(config, prefix, "data.validation")
    _require_one_tokenizer(config.data, train, validation)
    _require_end_tokens(config.data, train, validation)
    _require_weights(config, train)
    samples = training_samples(config.data, train, config.seed, config.sample_length())
    counts = token_counts(train, samples, config.model.padded_vocab_size())
    return RunDatasets(train, samples, counts, validation, _nearest_ids(config))


def _require_one_tokenizer(
    data: DataConfig, train: Sequence[IndexedDataset], validation: IndexedDataset | None
) -> None:
    """DataError where a dataset is known to be cut by another tokenizer than others, or than `data.tokenizer`."""
    named = {f"`data.train` ({each.prefix})": each for each in train}
    named |= {} if validation is None else {f"`data.validation` ({validation.prefix})": validation}
    cut_by = {what: each.cut_by() for what, each in named.items()}
    if data.tokenizer is not None and any(cut_by.values()):
        cut_by["`data.tokenizer`"] = Tokenizer(near_file(data.tokenizer)).identity()
    require_one_tokenizer(cut_by)


def _require_weights(config: RunConfig, train: Sequence[IndexedDataset]) -> None:
    """Reads what masks are weighed by, which a run that is causal at first would read only when it begins to mask."""
    settings = config.flat()
    for name in ("masking.strategy", "masking.dropping.by"):
        if settings.get(name) in ("frequency", "informative", "hardest", "weights"):
            TrainingText(config, train, name).token_counts()
    if config.data.id_weights is not None:
        Weights.read(config.data.id_weights, config.model.vocab_size)


def _nearest_ids(config: RunConfig) -> Tensor | None:
    path, wanted = config.data.nearest_ids, max(1, config.objective.nearest)
    return None if path is None else torch.from_numpy(open_nearest_ids(path, config.model.vocab_size, wanted))


def _open(config: RunConfig, prefix: str, field: str) -> IndexedDataset:
    """The dataset at `prefix`; ConfigError if its vocabulary is larger than the model's."""
    dataset = IndexedDataset(prefix)
    if dataset.info is not None and dataset.info.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"be at least that of {field} ({dataset.info.vocab_size:,})",
            got=f"{config.model.vocab_size:,}",
        )
    dataset.expect_ids_below(config.model.vocab_size)
    return dataset


def _require_end_tokens(data: DataConfig, train: Sequence[IndexedDataset], validation: IndexedDataset | None) -> None:
    """Checks end tokens where documents are told apart by them alone; packed rows know where documents begin."""
    for dataset in train:
        require_end_tokens(data, dataset, boundaries_known=data.pack == "best_fit")
    if validation is not None:
        require_end_tokens(data, validation)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else repr(error)


def _nothing() -> None:
    pass
