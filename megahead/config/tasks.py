"""Evaluation of tasks during training."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings


class TasksConfig(Settings):
    """Tasks that are evaluated every `every` steps, on an export of the current model."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks as `megahead eval-harness` knows them; they are divided among all ranks."""

    data: str | None = None
    """Folder of their files, as published; nothing is downloaded. Not needed if every task has its file given below."""

    cloze: str | None = None
    """A jsonl of {"text"} for the task `cloze`: the last word of each is predicted."""

    text: str | None = None
    """Text, as `megahead preprocess` takes it, for the task `bits_per_byte`."""

    every: int = Field(gt=0)
    """Optimizer steps between evaluations, each on an export of a checkpoint saved for it; also at the end."""

    limit: int | None = Field(default=None, gt=0)
    """Only this many first examples of each task (`blimp`: of each paradigm); all when left out. Ranks that are done
    wait for the slowest, at most `engine.timeout_seconds`."""
