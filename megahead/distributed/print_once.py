"""One sentence for a mistake that all ranks made: who comes first claims it, in the store through which ranks meet."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megahead.distributed.rendezvous import Launch, open_store
from megahead.distributed.waiting import with_timeout
from megahead.errors import print_error

PATIENCE_SECONDS = 5.0
"""How long a rank looks for the others before it speaks for itself: better twice than never."""


def print_error_once(launch: Launch, sentence: str) -> None:
    """Says `sentence` unless another rank of `launch` has said the same. Ranks call it when they fail, connected or not
    yet, from whichever thread, and leave afterwards."""
    if launch.world_size == 1:
        return print_error(sentence)
    try:
        store, first = with_timeout(PATIENCE_SECONDS, lambda: _claim(launch, sentence))
    except (RuntimeError, OSError, ValueError):
        return print_error(sentence)
    if first:
        print_error(sentence)
    if launch.rank == 0:  # it may keep the store
        with suppress(RuntimeError, TimeoutError):
            with_timeout(PATIENCE_SECONDS, lambda: _until_all_asked(store, launch.world_size))


def _claim(launch: Launch, sentence: str) -> tuple[Store, bool]:
    """Where the ranks meet, and whether nobody has said `sentence` there."""
    # over a connection of its own: what another one asked may have no answer yet
    store = open_store(launch, 0 if dist.is_initialized() else PATIENCE_SECONDS)
    first = store.add(f"megahead/told/{hashlib.sha256(sentence.encode()).hexdigest()}", 1) == 1
    store.add("megahead/asked", 1)
    return store, first


def _until_all_asked(store: Store, world_size: int) -> None:
    while store.add("megahead/asked", 0) < world_size:
        time.sleep(0.02)
