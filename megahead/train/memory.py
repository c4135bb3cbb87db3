"""Too little memory, told in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megahead.errors import UserError

_SIGNS = ("not enough memory", "out of memory", "Cannot allocate memory", "can't allocate memory", "overflowed")


@contextmanager
def memory_told() -> Iterator[None]:
    """Inside, running out of memory (the host's or the device's) is a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError) as error:
        known = isinstance(error, (MemoryError, OverflowError, torch.OutOfMemoryError))
        if not known and not any(sign in str(error) for sign in _SIGNS):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"memory must hold the model and a micro-batch, but does not ({reason}); lower batch.micro_size, shorten "
            "data.sequence_length, or split the model further (`--dry-run` estimates what is needed)."
        ) from error
