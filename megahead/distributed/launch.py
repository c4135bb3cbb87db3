"""How ranks find each other: the launcher's environment, the rendezvous, connecting, printing once."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megahead.distributed.group import Group
from megahead.distributed.watchdog import Connection, LostRankError, MonitorClient, RankMonitor, connect, with_timeout
from megahead.errors import UserError, exit_immediately, print_error

# `deepspeed`, `torchrun`, `srun` and Open MPI's `mpirun` pass a process its rank in environment variables.
# `read_launch` takes them as a mapping, so that nothing below `launch/` reads the environment itself.


_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}

_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}

_INTERACTIVE_STEP, _BATCH_STEP = "4294967290", "4294967291"
"""SLURM_STEP_ID of the shell that salloc may open on a node, and of a batch script: one process, whatever their other
variables say."""


@dataclass(frozen=True)
class Launch:
    """What the launcher passed to this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500

    attempt: int = 0
    """How often the launcher (torchrun) has restarted all ranks."""

    spare_ranks: int = 0
    """Ranks that the launcher started beyond `world_size`, which wait until those below it end."""

    ranks_per_node: int = 0
    """Ranks on this node; 0 where the launcher does not say."""

    restarts_ranks: bool = False
    """Whether the launcher (torchrun with --max-restarts) starts ranks again when some are lost or come."""

    uses_agent_store: bool = False
    """Whether the launcher (torchrun by default) keeps one store, at one address, however often ranks meet again."""

    slurm_tasks: int = 0
    """Tasks of the Slurm job (SLURM_NTASKS) in whose shell or batch script this process runs alone, without srun."""

    host_timeout_seconds: float | None = None
    """A machine that does not answer for so long is lost; None: only whether its ranks take part counts."""

    def with_world_size(self, ranks: int, timeout_seconds: float) -> Launch:
        """The same, but only the first `ranks` train, and others can take the place of a lost machine."""
        return replace(
            self, world_size=ranks, spare_ranks=self.world_size - ranks, host_timeout_seconds=timeout_seconds
        )


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that `environment` describes; a single process when it describes none.

    A task of srun has its rank from Slurm, a process of mpirun from Open MPI, whose daemons srun may have started,
    unless a launcher in it sets another.
    SLURM_NTASKS says nothing of a process: shells of salloc and scripts of sbatch have it, too, and run one. Raises
    UserError naming the variable that is missing, not a number, or contradicts others.
    """
    names = _OPEN_MPI if _OPEN_MPI["WORLD_SIZE"] in environment else _SLURM if _is_task(environment) else {}
    rank, size, local_rank = (name if name in environment else names.get(name, name) for name in _SLURM)
    values = {name: environment.get(name, "") for name in (rank, size, local_rank, "MASTER_ADDR", "MASTER_PORT")}
    if not values[size] and values[rank]:
        raise UserError(_missing(size, f"{rank} is {values[rank]}"))
    if not values[size]:
        return Launch(**_torchrun(environment), slurm_tasks=_number(environment, "SLURM_NTASKS"))
    if values[size] == "1":
        return Launch(**_torchrun(environment))
    if local_rank == "SLURM_LOCALID" and "," not in environment.get("CUDA_VISIBLE_DEVICES", ","):
        values[local_rank] = "0"  # srun gave this task one GPU of its own (--gpus-per-task, --gpu-bind)
    _check(values, size)
    tasks = environment.get(_SLURM["WORLD_SIZE"], values[size])
    if rank == "SLURM_PROCID" and tasks != values[size]:
        rule = f"be SLURM_STEP_NUM_TASKS ({tasks}) where srun starts the ranks"
        raise UserError(f"`{size}` must {rule}, but is {values[size]} instead; leave it out.")
    if int(values[rank]) >= int(values[size]):
        raise UserError(f"`{rank}` must be below {size} ({values[size]}), but is {values[rank]} instead.")
    place = int(values[rank]), int(values[size]), int(values[local_rank])
    return Launch(*place, values["MASTER_ADDR"], int(values["MASTER_PORT"]), **_torchrun(environment))


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process, or one above it; a batch script is PROCID 0, too, but of no step."""
    if environment.get("SLURM_STEP_ID") in (_INTERACTIVE_STEP, _BATCH_STEP):
        return False
    return (
        bool({"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environment.keys())
        or environment.get("SLURM_PROCID", "0") != "0"
    )


def _check(values: Mapping[str, str], size: str) -> None:
    """UserError for the first of a rank's variables that is missing, or no number."""
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UserError(_missing(missing[0], f"{size} is {values[size]}"))
    wrong = [name for name, value in values.items() if name != "MASTER_ADDR" and not value.isdecimal()]
    if wrong:
        raise UserError(f"`{wrong[0]}` must be a whole number in the environment, but is {values[wrong[0]]!r} instead.")


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "0")
    return int(value) if value.isdecimal() else 0


def _torchrun(environment: Mapping[str, str]) -> dict[str, Any]:
    """What torchrun's agent sets beside a rank's place; it counts the restarts of its own node alone."""
    uses_agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {
        "attempt": _number(environment, "TORCHELASTIC_RESTART_COUNT") if uses_agent_store else 0,
        "ranks_per_node": _number(environment, "LOCAL_WORLD_SIZE"),
        "restarts_ranks": _number(environment, "TORCHELASTIC_MAX_RESTARTS") > 0,
        "uses_agent_store": uses_agent_store,
    }


def _missing(name: str, when: str) -> str:
    return (
        f"`{name}` must be set in the environment when {when}, but is missing; start through deepspeed, torchrun or "
        "srun, or export it."
    )


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device; `auto` takes CUDA if there is a device. Makes it torch's current device."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError(
            "`engine.device` must be cpu or auto on this machine, but is cuda instead; torch sees no CUDA device."
        )
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"ranks per node must be at most the CUDA devices there ({count}), but local rank is {local_rank} instead; "
            "start fewer processes a node."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def open_store(launch: Launch, seconds: float) -> Store:
    """The store through which the ranks of `launch` find each other, in the process of rank 0 or of torchrun.

    Waits `seconds` for it, but not for the other ranks; RuntimeError, OSError or ValueError if it is not there.
    """
    if launch.rank > 0:
        _until_someone_listens(launch, seconds)
    url = f"tcp://{launch.address}:{launch.port}?rank={launch.rank}&world_size=-1"
    store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=max(seconds, 1))))
    # torchrun's store outlives the ranks, and still has the addresses of an earlier attempt
    return PrefixStore(f"attempt {launch.attempt}", store)


def _until_someone_listens(launch: Launch, seconds: float) -> None:
    """Waits before torch does, which would print warnings until it gave up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((launch.address, launch.port), min(max(seconds, 1), 60)).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            return


REPORT_SECONDS = 5.0
"""How long a rank tries to reach the store before it prints anyway: better twice than never."""


def print_error_once(launch: Launch, message: str) -> None:
    """Prints `message` unless another rank of `launch` has printed the same. Ranks call it when they fail, connected
    or not, from any thread, and end afterwards."""
    if launch.world_size == 1:
        return print_error(message)
    try:
        store, first = with_timeout(REPORT_SECONDS, lambda: _claim(launch, message))
    except (RuntimeError, OSError, ValueError):
        return print_error(message)
    if first:
        print_error(message)
    if launch.rank == 0:  # its process may be the one that serves the store
        with suppress(RuntimeError, TimeoutError):
            with_timeout(REPORT_SECONDS, lambda: _wait_until_all_reported(store, launch.world_size))


def _claim(launch: Launch, message: str) -> tuple[Store, bool]:
    """The store, and whether this rank is the first to claim `message` there."""
    # over a new connection: an existing one may still wait for an answer
    store = open_store(launch, 0 if dist.is_initialized() else REPORT_SECONDS)
    first = store.add(f"megahead/printed/{hashlib.sha256(message.encode()).hexdigest()}", 1) == 1
    store.add("megahead/reported", 1)
    return store, first


def _wait_until_all_reported(store: Store, world_size: int) -> None:
    while store.add("megahead/reported", 0) < world_size:
        time.sleep(0.02)


Settings = Mapping[str, str]
NO_SETTINGS: Settings = MappingProxyType({})

_MONITOR = "megahead/rank monitor"
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
    store, monitor = _rendezvous(launch, timeout_seconds, settings)
    with _counting_lost_ranks(store, launch):
        monitor.wait_for_all()
        with _failing_to(launch, timeout_seconds, "connect to the others"), monitor.explain_lost_ranks():
            limit, backend = timedelta(seconds=timeout_seconds), "nccl" if device.type == "cuda" else "gloo"
            rank, size = launch.rank, launch.world_size
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        with monitor.explain_lost_ranks():
            yield Group.world(timeout_seconds)
            monitor.finish()
    _disconnect()


def stand_by(launch: Launch, timeout_seconds: float, settings: Settings = NO_SETTINGS) -> None:
    """For a spare rank, one beyond `launch.world_size`: waits until the others leave; LostRankError if they do not.

    UserError if it does not find rank 0, or `settings` are not rank 0's.
    """
    _rendezvous(launch, timeout_seconds, settings)[1].stand_by()


def _rendezvous(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, MonitorClient]:
    """The store, and this rank's connection to the monitor."""
    with _failing_to(launch, seconds, "be found" if launch.rank == 0 else "find rank 0 there"):
        store, connection, first = with_timeout(seconds + 1, lambda: _open_connection(launch, seconds, settings))
    monitor = MonitorClient(connection, launch.rank, partial(_end_process, launch))
    with monitor.explain_lost_ranks():
        _refuse_other_settings(launch.rank, settings, first)
    return store, monitor


def _refuse_other_settings(rank: int, settings: Settings, first: Settings) -> None:
    """`first`: rank 0's."""
    names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
    if names:
        differing = [f"{name} ({settings.get(name)}, not {first.get(name)})" for name in names[:_MAX_NAMED]]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise UserError(
            f"all ranks must be of one run, but rank {rank} has other settings than rank 0: {', '.join(differing)}"
            f"{more}; give them one config, or each run a rendezvous of its own (torchrun's --rdzv-id)."
        )


@contextmanager
def _counting_lost_ranks(store: Store, launch: Launch) -> Iterator[None]:
    """Inside, lost ranks count as ranks that have reported their error: rank 0 waits for all (`print_error_once`)."""
    try:
        yield
    except LostRankError as error:
        if launch.rank == 0:
            with suppress(RuntimeError, TimeoutError):
                with_timeout(1, partial(store.add, "megahead/reported", len(error.lost)))
        raise


def _disconnect() -> None:
    """Ends this process's connections."""
    if dist.is_initialized():
        with suppress(TimeoutError):
            with_timeout(_DESTROY_SECONDS, dist.destroy_process_group)


def _end_process(launch: Launch, why: str) -> None:
    """Called in the client's thread, where a rank was lost and the main thread does not end the run within seconds."""
    print_error_once(launch, why)
    exit_immediately(2)


@contextmanager
def _failing_to(launch: Launch, seconds: float, trouble: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{launch.world_size} ranks must meet at {launch.address}:{launch.port} within {seconds:g} s, but rank "
            f"{launch.rank} could not {trouble} ({str(error).splitlines()[0]}); check MASTER_ADDR and MASTER_PORT."
        ) from error


def _open_connection(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, Connection, Settings]:
    """The store, this rank's connection to the monitor, whose address is in the store, and rank 0's settings."""
    store, host_timeout = open_store(launch, seconds), launch.host_timeout_seconds
    store.set_timeout(timedelta(seconds=seconds))
    host = launch.address
    if launch.rank == 0:
        monitor = RankMonitor(launch.world_size, seconds, launch.spare_ranks, host_timeout)
        store.set(_MONITOR, json.dumps([monitor.address, dict(settings)]))
        host = "127.0.0.1"
    address, first = json.loads(store.get(_MONITOR))
    return store, connect(host, address, launch.rank, seconds, host_timeout), first
