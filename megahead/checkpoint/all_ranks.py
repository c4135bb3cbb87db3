"""Doing something on every rank such that all of them go on, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megahead.distributed import Group
from megahead.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    sentence: str


def run_on_all_ranks(group: Group, action: Callable[[], T], tell: Callable[[Exception], str]) -> list[T]:
    """`action` on every rank; its (small) results in rank order on all of them.

    Where it fails on any rank, all ranks raise a CheckpointError with the first failing rank's `tell(error)`:
    nobody is left waiting. One gather of objects, after which every rank's action is over.
    """
    cause: Exception | None = None
    outcome: T | _Failure
    try:
        outcome = action()
    except Exception as error:
        cause, outcome = error, _Failure(tell(error))
    outcomes = group.all_gather_objects(outcome)
    failures = [each for each in outcomes if isinstance(each, _Failure)]
    if failures:
        raise CheckpointError(failures[0].sentence) from cause
    return [each for each in outcomes if not isinstance(each, _Failure)]
