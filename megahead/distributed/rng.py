"""Random numbers over the tensor axis: alike where ranks hold the same values, apart where each holds its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megahead.distributed.group import Group


@contextmanager
def per_rank_rng(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, every rank of `group` draws numbers of its own; afterwards all go on alike. Sends nothing.

    The ranks must be alike on entry. What is drawn follows from torch's CPU generator on entry, so that a forward
    pass that is repeated from the same state (activation checkpointing, a resumed run) draws the same again.
    """
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(2**48, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed * group.size + group.rank)
        yield
