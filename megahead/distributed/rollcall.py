"""Who is missing: when a rank dies or hangs, the others learn its name instead of an address, and end.

Waiting for a rank that died ends at once with gloo, waiting for one that hangs after the connection's timeout; both
as a RuntimeError that names nobody. Whoever gets it answers a roll call in the store through which ranks first met: at
fault is who does not answer in time, or answers with an error of another kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megahead.distributed.group import Group
from megahead.errors import UserError

GRACE_SECONDS = 5.0
"""How long the others have to answer; added to the time it takes to notice."""
_WAITED = "waited"


class LostRankError(UserError):
    """Another rank died, hangs, or failed."""


@contextmanager
def naming_lost_ranks(world: Group) -> Iterator[None]:
    """Inside, an error of waiting for others becomes a LostRankError that names them; other errors are told to them."""
    try:
        yield
    except Exception as error:
        waited = is_waiting_error(error)
        absent = _roll_call(world, _WAITED if waited else f"{type(error).__name__}: {error}") if world.size > 1 else {}
        if not waited or not absent:
            raise
        raise LostRankError(_sentence(absent)) from error


def is_waiting_error(error: BaseException) -> bool:
    """Whether `error` is what torch raises when other ranks do not take part: it has types for some cases only."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _roll_call(world: Group, answer: str) -> dict[int, str | None]:
    """Answers, waits for the others, and returns those at fault: rank to its own error, or None without an answer."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(world.rank), answer)
        others = [rank for rank in range(world.size) if rank != world.rank]
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not all(store.check([_key(rank)]) for rank in others):
            time.sleep(0.05)
        if world.rank == 0:
            time.sleep(0.3)  # the store is here: the others read it still
        answers = {rank: store.get(_key(rank)).decode() if store.check([_key(rank)]) else None for rank in others}
    except RuntimeError:
        return {0: None}  # it keeps the store
    return {rank: told for rank, told in answers.items() if told != _WAITED}


def _key(rank: int) -> str:
    return f"megahead/roll-call/{rank}"


def _sentence(absent: dict[int, str | None]) -> str:
    silent = [rank for rank, error in absent.items() if error is None]
    failed = [f"rank {rank} ended with {error}" for rank, error in absent.items() if error is not None]
    if silent:
        which = "rank" if len(silent) == 1 else "ranks"
        failed.append(f"{which} {', '.join(map(str, silent))} died or hangs (no answer within {GRACE_SECONDS:g} s)")
    return f"all ranks must take part in the run, but {'; '.join(failed)}; start again to resume."
