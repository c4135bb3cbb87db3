"""The datasets of a run, opened and checked before anything else, and held against those it began with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megahead.checkpoints.format import run_long_on_all_ranks, run_on_all_ranks
from megahead.checkpoints.reading import Checkpoint
from megahead.config.base import require
from megahead.config.data import DataConfig
from megahead.config.loading import config_from_checkpoint
from megahead.config.plan import Phase, matching_phase, same_objective
from megahead.config.run import RunConfig
from megahead.data.blending import Blend, describe_samples, token_counts, training_samples
from megahead.data.indexed import IndexedDataset, fetch_dataset, require_same_tokenizer
from megahead.data.loader import lacks_document_boundaries, require_end_tokens
from megahead.data.samples import Samples
from megahead.data.strategies import Weights
from megahead.data.strategy import TrainingText
from megahead.data.tokenizer import Tokenizer, has_fingerprint, tokenizer_fingerprint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, ConfigError, DataError
from megahead.remote_files import local_file
from megahead.train.preflight import check_run_files


@dataclass(frozen=True)
class RunDatasets:
    """Training datasets in the config's order, the samples drawn from them, and the held-out dataset."""

    train: Sequence[IndexedDataset]
    samples: Samples | Blend

    token_counts: Tensor
    """int64 [padded vocabulary]: how often each id occurs in the text that samples are drawn from (`data.sampling`)."""

    validation: IndexedDataset | None

    def describe(self, config: RunConfig) -> list[tuple[str, str]]:
        """Lines of the banner: epochs, shares of a blend, and datasets whose documents can attend to each other."""
        end = config.data.end_token
        apart = [
            ("documents", f"{dataset.prefix}: not kept apart, no row that was checked has an end token ({end})")
            for dataset in self.train
            if lacks_document_boundaries(config.data, dataset)
        ]
        unknown = [str(each.prefix) for each in self.train if each.tokenizer_identity() is None]
        if unknown and config.data.tokenizer is not None:
            apart.append(("tokenizer", f"not compared with {', '.join(unknown)}: not known there which one cut it"))
        return describe_samples(self.samples, config.training.steps * config.batch.global_size) + apart


def open_datasets(config: RunConfig, world_group: Group | None = None) -> RunDatasets:
    """Opens what the run reads: on rank 0 of `world_group` first, which packs rows if necessary, then on the others.
    What is remote is fetched before, once on each machine.

    UserError on all ranks if on any rank a dataset is missing, too short, or of another vocabulary or end token, or the
    tokenizer, a file of ids or one of a task cannot be the run's.
    Collective; packing must end within the group's timeout.
    """
    opened: list[RunDatasets] = []
    group = world_group or Group()

    def open_here(first: bool) -> None:
        if first and group.rank == 0:
            check_run_files(config)
        if first == (group.rank == 0):
            opened.append(_opened(config))

    run_long_on_all_ranks(group, _fetch_remote(config.data))
    for first in (True, False):
        try:
            run_on_all_ranks(group, partial(open_here, first))
        except CheckpointError as error:
            raise error.__cause__ or DataError(str(error)) from None  # the cause exists on the rank that failed
    return opened[0]


def _fetch_remote(data: DataConfig) -> Iterator[None]:
    """Fetches datasets that are named by a URL, so that opening them is quick; yields often."""
    for prefix in [*(part.prefix for part in data.parts()), data.validation]:
        if prefix is not None:
            for _ in fetch_dataset(prefix):
                yield


def _opened(config: RunConfig) -> RunDatasets:
    train = [_open(config, part.prefix, "data.train") for part in config.data.parts()]
    prefix = config.data.validation
    validation = None if prefix is None else _open(config, prefix, "data.validation")
    _require_one_tokenizer(config.data, train, validation)
    for dataset in train:  # where documents are told apart by them alone; packed rows know where documents begin
        require_end_tokens(config.data, dataset, boundaries_known=config.data.pack == "best_fit")
    if validation is not None:
        require_end_tokens(config.data, validation)
    _require_weights(config, train)
    samples = training_samples(config.data, train, config.seed, config.sample_length())
    counts = token_counts(train, samples, config.model.padded_vocab_size())
    return RunDatasets(train, samples, counts, validation)


def _require_one_tokenizer(
    data: DataConfig, train: Sequence[IndexedDataset], validation: IndexedDataset | None
) -> None:
    """DataError where a dataset is known to be cut by another tokenizer than others, or than `data.tokenizer`."""
    named = {f"`data.train` ({each.prefix})": each for each in train}
    named |= {} if validation is None else {f"`data.validation` ({validation.prefix})": validation}
    cut_by = {what: each.tokenizer_identity() for what, each in named.items()}
    if data.tokenizer is not None and any(cut_by.values()):
        cut_by["`data.tokenizer`"] = Tokenizer(local_file(data.tokenizer)).identity()
    require_same_tokenizer(cut_by)


def _require_weights(config: RunConfig, train: Sequence[IndexedDataset]) -> None:
    """Reads what masks are weighted by, which a run that is causal at first would read only when it begins to mask."""
    for setting, strategy in (config.masking.strategies_by_setting() if config.masking else {}).items():
        if strategy in ("frequency", "informative", "hardest", "weights"):
            TrainingText(config, train, setting).token_counts()
    if config.data.id_weights is not None:
        Weights.read(config.data.id_weights, config.model.vocab_size)


def _open(config: RunConfig, prefix: str, field: str) -> IndexedDataset:
    """The dataset at `prefix`; ConfigError if its vocabulary is larger than the model's, or its end token another."""
    dataset = IndexedDataset(prefix)
    if dataset.info is not None and dataset.info.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"be at least that of {field} ({dataset.info.vocab_size:,})",
            got=f"{config.model.vocab_size:,}",
        )
    end, given = dataset.info and dataset.info.end_token, config.data.end_token
    rule = f"be the id that closes documents of {field} ({end})"
    require(end in (None, given), "data.end_token", rule, got=given, hint="leave it out, or cut the text again")
    dataset.expect_ids_below(config.model.vocab_size)
    return dataset


# What must not change when a run is resumed: settings that change its result, and the data that they name.


MAY_CHANGE = (
    "name",
    "output_dir",
    "training",
    "parallel",
    "faults",
    "resume",
    "tasks",
    "batch.micro_size",
    "data.validation",
    "data.prefetch",
    "data.read_ahead",
    "engine.activation_checkpointing",
    "engine.attention",
    "engine.compile",
    "engine.deepspeed",
    "engine.device",
    "engine.embedding",
    "engine.timeout_seconds",
    "init.from_checkpoint",
    "init.from_hf",
    "objective.group_samples",
)
"""Settings and sections that may change between two sessions (launches) of a run: how long it trains, where, on what
hardware, and what it writes. (`objective.group_samples` may be written differently: the number that the run began with
is kept, see start.py.)"""


TOKENIZER = "data.tokenizer"
_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")


def data_fingerprints(config: RunConfig, datasets: RunDatasets) -> dict[str, Any]:
    """Fingerprints of the content of `data.train` (one per dataset), and of the files that `data` names beside it."""
    parts = [
        dataset.fingerprint if part.weight is None else f"{dataset.fingerprint}, weight {part.weight:g}"
        for part, dataset in zip(config.data.parts(), datasets.train, strict=True)
    ]
    tokenizer, weights = config.data.tokenizer, config.data.id_weights
    return {
        "data.train": parts,
        TOKENIZER: None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "data.id_weights": None if weights is None else _sha256(weights),
    }


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """That of the phase which saved it."""
    return config_from_checkpoint(checkpoint.config, source=f"the configuration in {checkpoint.folder}")


def is_from_another_phase(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether `checkpoint` was learned by another objective, or in another direction, than `config` goes on with."""
    return not same_objective(config_of(checkpoint), config)


def require_same_run(checkpoint: Checkpoint, config: RunConfig, fingerprints: dict[str, Any]) -> None:
    """CheckpointError naming every setting or file that differs and is neither in MAY_CHANGE nor in `resume.allow`.

    `config`: of the whole run; the checkpoint has that of the phase that saved it. `fingerprints`: what
    `data_fingerprints` gives now; the checkpoint's state has what it gave then.
    """
    saved = config_of(checkpoint)
    phase = matching_phase(config, saved)
    steps = saved.training.steps
    then = (
        saved.flat() | saved.schedule.resolved_steps(steps) | checkpoint.state_value("texts", dict, absent=fingerprints)
    )
    now = phase.config.flat() | phase.config.schedule.resolved_steps(steps) | fingerprints
    if then[TOKENIZER] and config.data.tokenizer and has_fingerprint(config.data.tokenizer, then[TOKENIZER]):
        then[TOKENIZER] = now[TOKENIZER]
    allowed = (*MAY_CHANGE, *config.resume.allow)
    differing = [
        _HASH.sub(r"\1", f"{name} (was {then.get(name)}, is {now.get(name)})")
        for name in {**then, **now}
        if then.get(name) != now.get(name) and not is_within(name, allowed)
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint.folder} must be of the same run to resume, but differs in {', '.join(differing)}; give a new "
            "run another `name` and `output_dir`, change these back, or name them in resume.allow."
        )
    _refuse_other_phases(checkpoint, phase, config.training.steps)


def _refuse_other_phases(checkpoint: Checkpoint, phase: Phase, steps: int) -> None:
    """CheckpointError where the phase that saved it begins elsewhere than it did, or ends earlier than the checkpoint;
    a run of one phase may be made shorter."""
    begin, end = phase.steps.start, phase.steps.stop
    began = checkpoint.state_value("phase_began", int, absent=min(begin, checkpoint.step))
    if began != begin or end < min(checkpoint.step, steps):
        raise CheckpointError(
            f"`objective.schedule` must have the phase that saved {checkpoint.folder} from step {began:,} to at least "
            f"step {checkpoint.step:,}, but has it from step {begin:,} to step {end:,} instead; set training.steps or "
            "the share back."
        )


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(local_file(path)).read_bytes()).hexdigest()


def is_within(name: str, sections: tuple[str, ...]) -> bool:
    """Whether a setting is one of `sections`, or in one."""
    return any(f"{name}.".startswith(f"{section}.") for section in sections)
