"""One sentence for a mistake that all ranks made: who comes first claims it, in the store through which ranks meet."""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megahead.distributed.rendezvous import Launch
from megahead.errors import print_error

PATIENCE_SECONDS = 5.0
"""How long a rank looks for the others before it speaks for itself: better twice than never."""


def print_error_once(launch: Launch, sentence: str) -> None:
    """Says `sentence` unless another rank of `launch` has said the same. Ranks call it when they fail, connected or not
    yet, and leave afterwards."""
    store = _store(launch)
    if store is None or _claims(store, sentence):
        print_error(sentence)
    if store is not None and launch.rank == 0:
        _wait_for_others(store, launch.world_size)


def _store(launch: Launch) -> Any:
    """Where the ranks of `launch` meet; None for a single process, and where the others do not come."""
    if launch.world_size == 1:
        return None
    try:
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        method, patience = f"tcp://{launch.address}:{launch.port}", timedelta(seconds=PATIENCE_SECONDS)
        store, _, _ = next(rendezvous(method, launch.rank, launch.world_size, timeout=patience))
        return dist.PrefixStore(f"attempt {launch.attempt}", store)  # type: ignore[attr-defined]
    except (RuntimeError, OSError, ValueError):
        return None


def _claims(store: Any, sentence: str) -> bool:
    try:
        first: bool = store.add(f"megahead/told/{hashlib.sha256(sentence.encode()).hexdigest()}", 1) == 1
        store.add("megahead/asked", 1)
    except RuntimeError:
        return True
    return first


def _wait_for_others(store: Any, world_size: int) -> None:
    """Rank 0 may keep the store: it stays until all have asked, or a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS / 2
    try:
        while time.monotonic() < deadline and store.add("megahead/asked", 0) < world_size:
            time.sleep(0.02)
    except RuntimeError:
        return
