"""Runs functions in daemon threads: a call to another machine may never return, and must not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def submit(function: Callable[[], T]) -> Future[T]:
    """Runs `function` in a new daemon thread, and returns its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
