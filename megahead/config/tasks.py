"""lm-eval's tasks in the middle of training."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings


class TasksConfig(Settings):
    """Tasks that are evaluated every `every` steps, on an export of the current model."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks as `megahead eval-harness` knows them, shared out over all ranks."""

    data: str
    """Folder of their files, as published; no hub is asked."""

    every: int = Field(gt=0)
    """Optimizer steps between evaluations, each on an export of a checkpoint saved for it; also at the end."""

    limit: int | None = Field(default=None, gt=0)
    """Only the first examples of each task; all when left out. Ranks that are done wait for the slowest, at most
    `engine.timeout_seconds`."""
