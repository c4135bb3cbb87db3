"""Waiting for other ranks in torch: which errors that raises, and a time limit for calls that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megahead.background import begin

T = TypeVar("T")


def is_waiting_error(error: BaseException) -> bool:
    """Whether torch raised `error` because other ranks do not take part; only some of these errors have a type."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """`function()`, or TimeoutError after `seconds`; the call then continues in a thread that nobody waits for.

    For requests to a store: if the process that serves it is suspended, torch waits forever, whatever its own limit.
    """
    try:
        return begin(function).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
