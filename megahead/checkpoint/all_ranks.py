"""Runs a function on every rank, after which either all ranks continue or all of them raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from megahead.distributed import Group
from megahead.errors import CheckpointError

T = TypeVar("T")

MEETING_SECONDS = 5.0
"""How long ranks work before they synchronize again."""


@dataclass(frozen=True)
class _Failure:
    sentence: str


def run_on_all_ranks(
    group: Group, action: Callable[[], T], describe_error: Callable[[Exception], str] = str
) -> list[T]:
    """Runs `action` on every rank; returns all ranks' (small) results in rank order. Collective.

    If it fails on any rank, all ranks raise a CheckpointError with the first failing rank's `describe_error(error)`, or
    `str(error)` where that fails itself, so that none is left waiting. Costs one all-gather of objects; on return every
    rank's action is over.
    """
    cause: Exception | None = None
    result: T | _Failure
    try:
        result = action()
    except Exception as error:
        cause, result = error, _Failure(_described(error, describe_error))
    results = group.all_gather_objects(result)
    failures = [each for each in results if isinstance(each, _Failure)]
    if failures:
        raise CheckpointError(failures[0].sentence) from cause
    return [each for each in results if not isinstance(each, _Failure)]


def _described(error: Exception, describe_error: Callable[[Exception], str]) -> str:
    try:
        return describe_error(error)
    except Exception:
        return str(error)


def run_long_on_all_ranks(group: Group, work: Iterator[None], describe_error: Callable[[Exception], str]) -> None:
    """Runs `work` to its end on every rank, as `run_on_all_ranks` does, however long it takes. Collective.

    All ranks synchronize every few seconds, well within `group.timeout_seconds`, so that those with less work do not
    time out; for that `work` must yield often.
    """
    seconds = min(MEETING_SECONDS, group.timeout_seconds / 10)
    while any(run_on_all_ranks(group, lambda: _has_more(work, seconds), describe_error)):
        pass


def _has_more(work: Iterator[None], seconds: float) -> bool:
    """Whether there is more to do after `seconds`."""
    deadline = time.monotonic() + seconds
    return any(time.monotonic() >= deadline for _ in work)
