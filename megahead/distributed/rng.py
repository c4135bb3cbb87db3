"""Random numbers on tensor ranks: equal where ranks hold the same values, different where each holds its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megahead.distributed.group import Group


@contextmanager
def per_rank_rng(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, every rank of `group` draws different numbers; afterwards all draw the same again. Sends nothing.

    Torch's CPU generator must be in the same state on all ranks on entry. Draws depend on that state alone, so that a
    forward pass that is repeated from it (activation checkpointing, a resumed run) draws the same again.
    """
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(2**48, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed * group.size + group.rank)
        yield
