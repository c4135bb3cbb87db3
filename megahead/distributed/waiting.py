"""Waits of torch: which errors they end in, and an end for those that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_waiting_error(error: BaseException) -> bool:
    """Whether `error` is what torch raises when other ranks do not take part: it has types for some cases only."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """`function()`, or TimeoutError after `seconds`: then it goes on in a thread that nobody waits for.

    For what asks a store: torch waits for an answer without end, whatever its time limit, when the process that keeps
    the store is stopped.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
