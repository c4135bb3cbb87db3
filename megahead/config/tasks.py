"""Tasks in the middle of training."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings


class TasksConfig(Settings):
    """Tasks that are evaluated every `every` steps, on an export of the current model."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks as `megahead eval-harness` knows them, shared out over all ranks."""

    data: str | None = None
    """Folder of their files, as published; no hub is asked. May be left out where all tasks have a file named below."""

    cloze: str | None = None
    """A jsonl of {"text"} for the task `cloze`: the last word of each is predicted."""

    text: str | None = None
    """Text, as `megahead preprocess` takes it, for the task `bits_per_byte`."""

    every: int = Field(gt=0)
    """Optimizer steps between evaluations, each on an export of a checkpoint saved for it; also at the end."""

    limit: int | None = Field(default=None, gt=0)
    """Only the first examples of each task (of `blimp`: of each paradigm); all when left out. Ranks that are done wait
    for the slowest, at most `engine.timeout_seconds`."""
