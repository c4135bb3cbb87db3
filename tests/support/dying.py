"""A process that ends in the middle of what it does to the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def die_at(point: int) -> None:
    """Ends this process, without any clean-up, right before its `point`-th act that touches names or disk."""
    acts = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal acts
            if acts == point:
                os._exit(9)
            acts += 1
            return function(*args, **kwargs)

        return act

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
