"""Connects ranks, watches for lost ones while they work, and disconnects them.

Beside torch's process group each rank has a *line*, a TCP connection to the *switchboard* at rank 0, over which lost
ranks are noticed; a rank's *watch* is its end of the line.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megahead.distributed.group import Group
from megahead.distributed.lines import Line, notice_lost_host
from megahead.distributed.print_once import expect_fewer_to_ask, print_error_once
from megahead.distributed.rendezvous import Launch, open_store
from megahead.distributed.switchboard import Switchboard
from megahead.distributed.waiting import with_timeout
from megahead.distributed.watch import LostRankError, Watch
from megahead.errors import UserError, leave

Settings = Mapping[str, str]
NO_SETTINGS: Settings = MappingProxyType({})

_SWITCHBOARD = "megahead/switchboard"
_SETTINGS = "megahead/settings"
_MAX_NAMED = 4
_DESTROY_SECONDS = 10.0


@contextmanager
def connected(
    launch: Launch, device: torch.device, timeout_seconds: float, settings: Settings = NO_SETTINGS
) -> Iterator[Group]:
    """Connects all ranks of `launch` as one Group (nccl for CUDA, else gloo) until all leave the block. Collective.

    If torch.distributed is initialized already, that group is used, and stays. Ranks wait for each other at most
    `timeout_seconds`, plus a few seconds to find out which are missing. UserError if they do not find each other or
    `settings` (from name to value) are not rank 0's, LostRankError if one dies, hangs or fails afterwards.
    """
    if dist.is_initialized():
        yield Group.world(timeout_seconds)
        return
    if launch.world_size == 1 and not launch.spare_ranks:
        try:
            yield Group()
        finally:
            _disconnect()  # the engine makes a group of one
        return
    store, watch = _meet(launch, timeout_seconds, settings)
    with _counting_lost_ranks(store, launch):
        watch.wait_for_all()
        with _failing_to(launch, timeout_seconds, "connect to the others"), watch.naming_lost_ranks():
            _connect(store, launch, device, timeout_seconds)
        with watch.naming_lost_ranks():
            yield Group.world(timeout_seconds)
            watch.leave()
    _disconnect()


def look_on(launch: Launch, timeout_seconds: float, settings: Settings = NO_SETTINGS) -> None:
    """For a spare rank, one beyond `launch.world_size`: waits until the others leave; LostRankError if they do not.

    UserError if it does not find rank 0, or `settings` are not rank 0's.
    """
    _meet(launch, timeout_seconds, settings)[1].look_on()


def _meet(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, Watch]:
    """The store, and the watch over this rank's line to rank 0."""
    with _failing_to(launch, seconds, "be found" if launch.rank == 0 else "find rank 0 there"):
        store, line, first = with_timeout(seconds + 1, lambda: _open_line(launch, seconds, settings))
    watch = Watch(line, launch.rank, seconds, partial(_end_process, launch))
    with watch.naming_lost_ranks():
        _refuse_other_settings(launch.rank, settings, first)
    return store, watch


def _refuse_other_settings(rank: int, settings: Settings, first: Settings) -> None:
    """`first`: rank 0's."""
    names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
    if names:
        differing = [f"{name} ({settings.get(name)}, not {first.get(name)})" for name in names[:_MAX_NAMED]]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise UserError(
            f"all ranks must be of one run, but rank {rank} has other settings than rank 0: {', '.join(differing)}"
            f"{more}; give them one config, or each run a meeting place of its own (torchrun's --rdzv-id)."
        )


@contextmanager
def _counting_lost_ranks(store: Store, launch: Launch) -> Iterator[None]:
    """Before an error is printed every rank asks the store whether it is the first, and rank 0 waits until all have;
    this tells it how many never will."""
    try:
        yield
    except LostRankError as error:
        if launch.rank == 0:
            with suppress(RuntimeError, TimeoutError):
                with_timeout(1, partial(expect_fewer_to_ask, store, len(error.lost)))
        raise


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


def _open_line(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, Line, Settings]:
    """The store, this rank's line to rank 0, whose port and token are in the store, and rank 0's settings."""
    store = open_store(launch, seconds)
    store.set_timeout(timedelta(seconds=seconds))
    if launch.rank == 0:
        board = Switchboard(launch.world_size, seconds, launch.spare_ranks, launch.host_timeout_seconds)
        store.set(_SETTINGS, json.dumps(dict(settings)))
        store.set(_SWITCHBOARD, board.address)
        return store, board.start(), settings
    first = json.loads(store.get(_SETTINGS))  # first: once all are connected rank 0 goes on, and may hang
    port, token = store.get(_SWITCHBOARD).decode().split()
    connection = socket.create_connection((launch.address, int(port)), min(seconds, 60))
    if launch.host_timeout_seconds is not None:
        notice_lost_host(connection, launch.host_timeout_seconds)
    line = Line(connection)
    line.send("hello", token, launch.rank)
    return store, line, first


def _connect(store: Store, launch: Launch, device: torch.device, seconds: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=patience)
