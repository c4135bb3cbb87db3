"""What becomes of the checkpoints that a mirror is offered, for the log and the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class News:
    """What became of a checkpoint, or of the small files."""

    facts: dict[str, Any]
    """For the log: its `step`; `seconds` and `bytes` if it arrived, else why it `failed`, or that it was `skipped`."""

    sentence: str | None = None
    """For the console, if something is wrong."""


def arrived(step: int, seconds: float, sent: int) -> News:
    return News({"step": step, "seconds": round(seconds, 3), "bytes": sent})


def failed(step: int, folder: object, reason: str) -> News:
    sentence = f"step {step:,} is not in the mirror, only in {folder}: {reason}"
    return News({"step": step, "failed": reason}, sentence)


def skipped(step: int, url: str) -> News:
    sentence = f"step {step:,} is not copied to the mirror, since an older one is still on its way to {url}"
    return News({"step": step, "skipped": True}, sentence)


def log_failed(reason: str) -> News:
    return News({"failed": reason}, f"the run's log is not in the mirror: {reason}")
