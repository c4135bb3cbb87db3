"""Runs a function in a forked process of its own, whose signals, connections and settings nobody else needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, or raises; in the process's main thread, and without a process group."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result(timeout=120)
