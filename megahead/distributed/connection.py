"""Connects ranks, watches for lost ones while they work, and disconnects them.

Beside torch's process group each rank has a *line*, a TCP connection to the *switchboard* at rank 0, over which lost
ranks are noticed; a rank's *watch* is its end of the line.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megahead.distributed.group import Group
from megahead.distributed.lines import Line
from megahead.distributed.print_once import print_error_once
from megahead.distributed.rendezvous import Launch, open_store
from megahead.distributed.switchboard import Switchboard
from megahead.distributed.waiting import with_timeout
from megahead.distributed.watch import Watch
from megahead.errors import UserError, leave

_SWITCHBOARD = "megahead/switchboard"
_DESTROY_SECONDS = 10.0


@contextmanager
def connected(launch: Launch, device: torch.device, timeout_seconds: float) -> Iterator[Group]:
    """Connects all ranks of `launch` as one Group (nccl for CUDA, else gloo) until all leave the block. Collective.

    If torch.distributed is initialized already, that group is used, and stays. Ranks wait for each other at most
    `timeout_seconds`, plus a few seconds to find out which are missing. UserError if they do not find each other,
    LostRankError if one dies, hangs or fails afterwards.
    """
    if dist.is_initialized():
        yield Group.world(timeout_seconds)
        return
    if launch.world_size == 1:
        try:
            yield Group()
        finally:
            _disconnect()  # the engine makes a group of one
        return
    with _failing_to(launch, timeout_seconds, "be found" if launch.rank == 0 else "find rank 0 there"):
        store, line = with_timeout(timeout_seconds + 1, lambda: _open_line(launch, timeout_seconds))
    watch = Watch(line, launch.rank, timeout_seconds, partial(_end_process, launch))
    watch.meet()
    with _failing_to(launch, timeout_seconds, "connect to the others"), watch.naming_lost_ranks():
        _connect(store, launch, device, timeout_seconds)
    with watch.naming_lost_ranks():
        yield Group.world(timeout_seconds)
        watch.leave()
    _disconnect()


def _disconnect() -> None:
    """Ends this process's connections."""
    if dist.is_initialized():
        with suppress(TimeoutError):
            with_timeout(_DESTROY_SECONDS, dist.destroy_process_group)


def _end_process(launch: Launch, why: str) -> None:
    """Called in the watch's thread, where a rank was lost and the main thread does not end the run within seconds."""
    print_error_once(launch, why)
    leave(2)


@contextmanager
def _failing_to(launch: Launch, seconds: float, trouble: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{launch.world_size} ranks must meet at {launch.address}:{launch.port} within {seconds:g} s, but rank "
            f"{launch.rank} could not {trouble} ({str(error).splitlines()[0]}); check MASTER_ADDR and MASTER_PORT."
        ) from error


def _open_line(launch: Launch, seconds: float) -> tuple[Store, Line]:
    """The store, and this rank's line to rank 0, whose address is in the store."""
    store = open_store(launch, seconds)
    store.set_timeout(timedelta(seconds=seconds))
    if launch.rank == 0:
        board = Switchboard(launch.world_size, seconds)
        store.set(_SWITCHBOARD, board.address)
        return store, board.start()
    port, token = store.get(_SWITCHBOARD).decode().split()
    line = Line(socket.create_connection((launch.address, int(port)), min(seconds, 60)))
    line.send("hello", token, launch.rank)
    return store, line


def _connect(store: Store, launch: Launch, device: torch.device, seconds: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=patience)
