"""Explains an out-of-memory error in one sentence that names what to change."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megahead.config import RunPlan
from megahead.errors import UserError
from megahead.estimate import rank_memory, ways_to_need_less
from megahead.wording import gib

_SIGNS = (
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",  # no room for its stack
    "std::bad_alloc",
    "overflowed",
)


@contextmanager
def explain_out_of_memory(plan: RunPlan) -> Iterator[None]:
    """Inside the block, running out of memory (the host's or the device's) raises a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        needed = gib(rank_memory(plan).total)
        raise UserError(
            f"memory must hold a rank's share of the run, at ZeRO {plan.zero_stage} about {needed}, but does not "
            f"({reason}); {', or '.join(ways_to_need_less(plan))}."
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError):
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or any(sign in str(error) for sign in _SIGNS)
