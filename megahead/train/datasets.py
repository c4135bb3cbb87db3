"""Opens and checks the datasets of a run, and compares a resumed run's settings and data with its checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megahead.checkpoints.format import run_generator_on_all_ranks, run_on_all_ranks
from megahead.checkpoints.reading import Checkpoint
from megahead.config.data import DataConfig
from megahead.config.plan import Phase, matching_phase, same_objective
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset, fetch_dataset
from megahead.data.loader import (
    Blend,
    describe_samples,
    lacks_document_boundaries,
    require_end_tokens,
    token_counts,
    training_samples,
)
from megahead.data.samples import Samples, held_out_samples
from megahead.data.strategies import Weights
from megahead.data.strategy import TrainingText
from megahead.data.tokenizer import has_fingerprint, tokenizer_fingerprint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, DataError
from megahead.files import sha256_of
from megahead.remote_files import local_file
from megahead.train.preflight import check_run_files, open_compared


@dataclass(frozen=True)
class RunDatasets:
    """Training datasets in the config's order, the samples drawn from them, and the held-out samples."""

    train: Sequence[IndexedDataset]
    samples: Samples | Blend

    token_counts: Tensor
    """int64 [padded vocabulary]: how often each id occurs in the text that samples are drawn from (`data.sampling`)."""

    held_out: Samples | None

    def describe(self, config: RunConfig) -> list[tuple[str, str]]:
        """Lines of the banner: epochs, shares of a blend, and warnings about document boundaries and tokenizers."""
        end = config.data.end_token
        warnings = [
            ("documents", f"{dataset.prefix}: not kept apart, no row that was checked has an end token ({end})")
            for dataset in self.train
            if lacks_document_boundaries(config.data, dataset)
        ]
        unknown = [str(dataset.prefix) for dataset in self.train if dataset.tokenizer_identity() is None]
        if unknown and config.data.tokenizer is not None:
            message = f"not compared with {', '.join(unknown)}: what tokenized it is not recorded"
            warnings.append(("tokenizer", message))
        return describe_samples(self.samples, config.training.steps * config.batch.global_size) + warnings


def open_datasets(config: RunConfig, world_group: Group | None = None) -> RunDatasets:
    """Fetches remote datasets, once on each machine; then opens all on rank 0 of `world_group`, which packs rows if
    necessary, and then on the other ranks.

    UserError on all ranks if on any rank a dataset is missing, too short, or has another vocabulary or end token, or if
    the run cannot use its tokenizer, file of id weights or task files. Collective; packing must end within the group's
    timeout.
    """
    datasets: list[RunDatasets] = []
    group = world_group or Group()

    def open_on(first_rank: bool) -> None:
        if first_rank and group.rank == 0:
            check_run_files(config)
        if first_rank == (group.rank == 0):
            datasets.append(_open_all(config))

    run_generator_on_all_ranks(group, _fetch_remote(config.data))
    for first_rank in (True, False):
        try:
            run_on_all_ranks(group, partial(open_on, first_rank))
        except CheckpointError as error:
            raise error.__cause__ or DataError(str(error)) from None  # the cause exists on the rank that failed
    return datasets[0]


def _fetch_remote(data: DataConfig) -> Iterator[None]:
    """Fetches the datasets with a URL as prefix; yields often."""
    for prefix in [*(part.prefix for part in data.parts()), data.validation]:
        if prefix is not None:
            for _ in fetch_dataset(prefix):
                yield


def _open_all(config: RunConfig) -> RunDatasets:
    train = open_compared(config)
    validation = None if config.data.validation is None else train.pop()
    for dataset in train:  # packed rows have document boundaries without them
        require_end_tokens(config.data, dataset, boundaries_known=config.data.pack == "best_fit")
    if validation is not None:
        require_end_tokens(config.data, validation)
    _check_masking_weights(config, train)
    samples = training_samples(config.data, train, config.seed, config.sample_length())
    counts = token_counts(train, samples, config.model.padded_vocab_size())
    held_out = None if validation is None else held_out_samples(validation, config.sample_length())
    return RunDatasets(train, samples, counts, held_out)


def _check_masking_weights(config: RunConfig, train: Sequence[IndexedDataset]) -> None:
    """Reads what masking strategies weigh ids by (these four need token counts), to report errors also if the run masks
    only in a later phase."""
    for setting, strategy in (config.masking.strategies_by_setting() if config.masking else {}).items():
        if strategy in ("frequency", "informative", "hardest", "weights"):
            TrainingText(config, train, setting).token_counts()
    if config.data.id_weights is not None:
        Weights.read(config.data.id_weights, config.model.vocab_size)


# Settings that change the result of a run, and the data that they name, must not change when it is resumed.


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
    "engine.graphs",
    "engine.timeout_seconds",
    "init.from_checkpoint",
    "init.from_hf",
    "objective.group_samples",
)
"""Settings and sections that may change between two sessions (launches) of a run: its length, paths, hardware and
output. (`objective.group_samples` may change, but the value of the first session is used, see start.py.)"""


TOKENIZER = "data.tokenizer"
FINGERPRINTED = ("data.train", TOKENIZER, "data.id_weights")
"""Settings that name files; runs are compared by the files' content."""

_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")


def data_fingerprints(config: RunConfig, datasets: RunDatasets) -> dict[str, Any]:
    """Fingerprints of the content of `data.train` (one per dataset), and of the other files in `data`."""
    parts = [
        dataset.fingerprint if part.weight is None else f"{dataset.fingerprint}, weight {part.weight:g}"
        for part, dataset in zip(config.data.parts(), datasets.train, strict=True)
    ]
    tokenizer, weights = config.data.tokenizer, config.data.id_weights
    return {
        "data.train": parts,
        TOKENIZER: None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "data.id_weights": None if weights is None else sha256_of(Path(local_file(weights))),
    }


def is_from_another_phase(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether `checkpoint` was trained with another objective or attention direction than `config`."""
    return not same_objective(checkpoint.run_config(), config)


def require_same_run(checkpoint: Checkpoint, config: RunConfig, fingerprints: dict[str, Any]) -> None:
    """CheckpointError naming every setting or file that differs and is neither in MAY_CHANGE nor in `resume.allow`.

    `config`: of the whole run (the checkpoint has that of its phase); `fingerprints`: the current `data_fingerprints`.
    """
    saved = checkpoint.run_config()
    phase = matching_phase(config, saved)
    steps = saved.training.steps
    saved_values = saved.flat() | saved.schedule.resolved_steps(steps)
    saved_values |= checkpoint.state_value("texts", dict, default=fingerprints)  # its `data_fingerprints`
    values = phase.config.flat() | phase.config.schedule.resolved_steps(steps) | fingerprints
    saved_tokenizer, tokenizer = saved_values[TOKENIZER], config.data.tokenizer
    differs = saved_tokenizer != values[TOKENIZER]
    if differs and saved_tokenizer and tokenizer and has_fingerprint(tokenizer, saved_tokenizer):
        saved_values[TOKENIZER] = values[TOKENIZER]
    allowed = (*MAY_CHANGE, *config.resume.allow)
    differing = [
        _HASH.sub(r"\1", f"{name} (was {saved_values.get(name)}, is {values.get(name)})")
        for name in {**saved_values, **values}
        if saved_values.get(name) != values.get(name) and not is_within(name, allowed)
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint.folder} must be of the same run to resume, but differs in {', '.join(differing)}; give a new "
            "run another `name` and `output_dir`, change these back, or name them in resume.allow."
        )
    _require_same_phase(checkpoint, phase, config.training.steps)


def _require_same_phase(checkpoint: Checkpoint, phase: Phase, steps: int) -> None:
    """CheckpointError if the first step of `phase` differs from that in `checkpoint`, or it ends before `checkpoint`
    (except at the end of a run that was made shorter)."""
    start, stop = phase.steps.start, phase.steps.stop
    saved_start = checkpoint.state_value("phase_began", int, default=min(start, checkpoint.step))
    if saved_start != start or stop < min(checkpoint.step, steps):
        raise CheckpointError(
            f"`objective.schedule` must have the phase that saved {checkpoint.folder} from step {saved_start:,} to at "
            f"least step {checkpoint.step:,}, but has it from step {start:,} to step {stop:,} instead; set "
            "training.steps or the share back."
        )


def is_within(name: str, sections: tuple[str, ...]) -> bool:
    """Whether the setting `name` is in one of `sections`, or is one of them."""
    return any(f"{name}.".startswith(f"{section}.") for section in sections)
