"""Prints an error that all ranks have only once: the rank that is first to claim it in the shared store prints it."""

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
"""How long a rank tries to reach the store before it prints anyway: better twice than never."""


def print_error_once(launch: Launch, sentence: str) -> None:
    """Prints `sentence` unless another rank of `launch` has printed the same. Ranks call it when they fail, connected
    or not, from any thread, and end afterwards."""
    if launch.world_size == 1:
        return print_error(sentence)
    try:
        store, first = with_timeout(PATIENCE_SECONDS, lambda: _claim(launch, sentence))
    except (RuntimeError, OSError, ValueError):
        return print_error(sentence)
    if first:
        print_error(sentence)
    if launch.rank == 0:  # its process may be the one that serves the store
        with suppress(RuntimeError, TimeoutError):
            with_timeout(PATIENCE_SECONDS, lambda: _until_all_asked(store, launch.world_size))


def expect_fewer_to_ask(store: Store, lost: int) -> None:
    """`lost` ranks will not call `print_error_once`."""
    store.add("megahead/asked", lost)


def _claim(launch: Launch, sentence: str) -> tuple[Store, bool]:
    """The store, and whether this rank is the first to claim `sentence` there."""
    # over a new connection: an existing one may still wait for an answer
    store = open_store(launch, 0 if dist.is_initialized() else PATIENCE_SECONDS)
    first = store.add(f"megahead/printed/{hashlib.sha256(sentence.encode()).hexdigest()}", 1) == 1
    store.add("megahead/asked", 1)
    return store, first


def _until_all_asked(store: Store, world_size: int) -> None:
    while store.add("megahead/asked", 0) < world_size:
        time.sleep(0.02)
