"""What must not change when a run is resumed: settings that change its result, and the data that they name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from megahead.checkpoint import Checkpoint
from megahead.config import Phase, RunConfig, config_from_checkpoint, learn_alike, phase_that_saved
from megahead.corpus.tokenizer import has_mark, tokenizer_mark
from megahead.errors import CheckpointError
from megahead.far import near_file
from megahead.train.datasets import RunDatasets

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
    files = {f"data.{name}": getattr(config.data, name) for name in ("nearest_ids", "id_weights")}
    hashes = {name: None if path is None else _sha256(path) for name, path in files.items()}
    tokenizer = config.data.tokenizer
    return {"data.train": parts, TOKENIZER: None if tokenizer is None else tokenizer_mark(tokenizer)} | hashes


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """That of the phase which saved it."""
    return config_from_checkpoint(checkpoint.config, source=f"the configuration in {checkpoint.folder}")


def is_of_another_phase(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether `checkpoint` was learned by another objective, or in another direction, than `config` goes on with."""
    return not learn_alike(config_of(checkpoint), config)


def refuse_another_run(checkpoint: Checkpoint, config: RunConfig, fingerprints: dict[str, Any]) -> None:
    """CheckpointError naming every setting or file that differs and is neither in MAY_CHANGE nor in `resume.allow`.

    `config`: of the whole run; the checkpoint has that of the phase that saved it. `fingerprints`: what
    `data_fingerprints` gives now; the checkpoint's state has what it gave then.
    """
    saved = config_of(checkpoint)
    phase = phase_that_saved(config, saved)
    then = saved.flat() | checkpoint.state_value("texts", dict, absent=fingerprints)
    now = phase.config.flat() | fingerprints
    if then[TOKENIZER] and config.data.tokenizer and has_mark(config.data.tokenizer, then[TOKENIZER]):
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
    _refuse_another_course(checkpoint, phase, config.training.steps)


def _refuse_another_course(checkpoint: Checkpoint, phase: Phase, steps: int) -> None:
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
    return hashlib.sha256(Path(near_file(path)).read_bytes()).hexdigest()


def is_within(name: str, sections: tuple[str, ...]) -> bool:
    """Whether a setting is one of `sections`, or in one."""
    return any(f"{name}.".startswith(f"{section}.") for section in sections)
