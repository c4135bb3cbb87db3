"""The launcher's environment, the rendezvous of the ranks, their process group, and errors that are printed once."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
# `read_launch` takes them as a mapping: only the scripts in `launch/` read the environment.


_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}

_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}

_INTERACTIVE_STEP, _BATCH_STEP = "4294967290", "4294967291"
"""SLURM_STEP_ID of the shell that salloc may open on a node, and of a batch script. Both are single processes even if
their other variables describe several tasks."""


@dataclass(frozen=True)
class Launch:
    """What the launcher passed to this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    address: str = "127.0.0.1"
    """Rank 0's host (MASTER_ADDR)."""

    port: int = 29500

    attempt: int = 0
    """How often the launcher (torchrun) has restarted all ranks."""

    spare_ranks: int = 0
    """Ranks that the launcher started beyond `world_size`; they wait until the others end."""

    ranks_per_node: int = 0
    """Ranks on this node; 0 if the launcher does not set it."""

    restarts_ranks: bool = False
    """Whether the launcher (torchrun with --max-restarts) restarts ranks when some are lost or join."""

    uses_agent_store: bool = False
    """Whether the launcher (torchrun by default) reuses one store, at one address, for every restart."""

    has_launcher: bool = False
    """Whether a launcher started this process. It kills ranks seconds after a signal (torchrun, deepspeed, scancel: 30
    s; launch/slurm.sh before the time limit: 120 s)."""

    launch_id: str = ""
    """LAUNCH_ID, the same in all restarts by one launcher; scripts in launch/ set it."""

    slurm_tasks: int = 0
    """Tasks of the Slurm job (SLURM_NTASKS) if this process is its shell or batch script, not started by srun."""

    host_timeout_seconds: float | None = None
    """A machine that does not answer for so long is lost; None: only its ranks are monitored."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that `environment` describes; a single process by default.

    RANK, WORLD_SIZE and LOCAL_RANK come first, then Open MPI's variables (srun may have started its daemons), then
    those of a Slurm task. SLURM_NTASKS is ignored, since the single processes of salloc and sbatch have it too.
    UserError for a variable that is missing, not a number, or contradicts others.
    """
    names = _OPEN_MPI if _OPEN_MPI["WORLD_SIZE"] in environment else _SLURM if _is_slurm_task(environment) else {}
    rank, size, local_rank = (name if name in environment else names.get(name, name) for name in _SLURM)
    values = {name: environment.get(name, "") for name in (rank, size, local_rank, "MASTER_ADDR", "MASTER_PORT")}
    fields = _restart_fields(environment)
    if not values[size] and values[rank]:
        raise UserError(_missing_message(size, f"{rank} is {values[rank]}"))
    if not values[size]:
        return Launch(**fields, slurm_tasks=_read_int(environment, "SLURM_NTASKS"))
    if rank in names.values():
        _require_all_tasks(size, values[size], names["WORLD_SIZE"], environment)
    if values[size] == "1":
        return Launch(**fields, has_launcher=True)
    if local_rank == "SLURM_LOCALID" and "," not in environment.get("CUDA_VISIBLE_DEVICES", ","):
        values[local_rank] = "0"  # srun gave this task one GPU of its own (--gpus-per-task, --gpu-bind)
    _validate(values, size)
    if int(values[rank]) >= int(values[size]):
        raise UserError(f"`{rank}` must be below {size} ({values[size]}), but is {values[rank]} instead.")
    ranks = int(values[rank]), int(values[size]), int(values[local_rank])
    return Launch(*ranks, values["MASTER_ADDR"], int(values["MASTER_PORT"]), **fields, has_launcher=True)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process or an ancestor. A batch script has PROCID 0, too, but belongs to no step."""
    if environment.get("SLURM_STEP_ID") in (_INTERACTIVE_STEP, _BATCH_STEP):
        return False
    return (
        bool({"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environment.keys())
        or environment.get("SLURM_PROCID", "0") != "0"
    )


def _require_all_tasks(size: str, value: str, tasks_name: str, environment: Mapping[str, str]) -> None:
    """UserError if `value`, that of the variable `size`, is not srun's or mpirun's number of tasks."""
    tasks, launcher = environment.get(tasks_name, value), "mpirun" if tasks_name.startswith("OMPI") else "srun"
    if value != tasks:
        rule = f"be {tasks_name} ({tasks}) where {launcher} starts the ranks"
        raise UserError(f"`{size}` must {rule}, but is {value} instead; leave it out, or set RANK too.")


def _validate(values: Mapping[str, str], size: str) -> None:
    """UserError for the first of a rank's variables that is missing or not a number."""
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UserError(_missing_message(missing[0], f"{size} is {values[size]}"))
    invalid = [name for name, value in values.items() if name != "MASTER_ADDR" and not value.isdecimal()]
    if invalid:
        name, value = invalid[0], values[invalid[0]]
        raise UserError(f"`{name}` must be a whole number in the environment, but is {value!r} instead.")
    if not 0 < int(values["MASTER_PORT"]) < 65536:  # resolving it would be tried again until the timeout
        raise UserError(f"`MASTER_PORT` must be from 1 to 65535, but is {values['MASTER_PORT']} instead.")


def _read_int(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "0")
    return int(value) if value.isdecimal() else 0


def _restart_fields(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a Launch from LAUNCH_ID and torchrun's own variables. torchrun counts restarts for each node alone;
    the count is used only where its store outlives them."""
    uses_agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {
        "attempt": _read_int(environment, "TORCHELASTIC_RESTART_COUNT") if uses_agent_store else 0,
        "ranks_per_node": _read_int(environment, "LOCAL_WORLD_SIZE"),
        "restarts_ranks": _read_int(environment, "TORCHELASTIC_MAX_RESTARTS") > 0,
        "uses_agent_store": uses_agent_store,
        "launch_id": environment.get("LAUNCH_ID", ""),
    }


def _missing_message(name: str, when: str) -> str:
    return (
        f"`{name}` must be set in the environment when {when}, but is missing; start through deepspeed, torchrun or "
        "srun, or export it."
    )


def choose_device(name: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device, set as torch's current device; `auto` is CUDA if that is available."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError(
            "`engine.device` must be cpu or auto on this machine, but is cuda instead; torch sees no CUDA device."
        )
    if name == "cpu" or not has_cuda:
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
    """The rendezvous store of `launch`, which rank 0's or torchrun's process serves. Waits `seconds` for it, but not
    for the other ranks; RuntimeError, OSError or ValueError if it is not reachable."""
    _wait_for_address(launch, seconds)
    host = f"[{launch.address}]" if ":" in launch.address else launch.address  # of IPv6
    url = f"tcp://{host}:{launch.port}?rank={launch.rank}&world_size=-1"
    store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=max(seconds, 1))))
    # torchrun's store outlives the ranks, and still has the addresses of an earlier attempt
    return PrefixStore(f"attempt {launch.attempt}", store)


def _wait_for_address(launch: Launch, seconds: float) -> None:
    """Waits until the name is known, and on other ranks than 0 the port open; torch would print warnings meanwhile."""
    deadline, address = time.monotonic() + seconds, (launch.address, launch.port)
    while True:
        try:
            if launch.rank == 0:
                socket.getaddrinfo(*address)
            else:
                socket.create_connection(address, min(max(seconds, 1), 60)).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            return


REPORT_SECONDS = 5.0
"""How long a failing rank tries to reach the store before it prints its error regardless of the others."""


def print_error_once(launch: Launch, message: str) -> None:
    """Prints `message` unless another rank of `launch` has printed the same. Ranks call it when they fail, connected or
    not, from any thread, and exit afterwards."""
    if launch.world_size == 1:
        return print_error(message)
    try:
        store, is_first = with_timeout(REPORT_SECONDS, lambda: _claim_message(launch, message))
    except (RuntimeError, OSError, ValueError):
        return print_error(message)
    if is_first:
        print_error(message)
    if launch.rank == 0:  # its process may serve the store
        with suppress(RuntimeError, TimeoutError):
            with_timeout(REPORT_SECONDS, lambda: _wait_until_all_reported(store, launch.world_size))


def _claim_message(launch: Launch, message: str) -> tuple[Store, bool]:
    """The store, and whether this rank is the first to claim `message` there."""
    # over a new connection: an existing one may still wait for an answer
    store = open_store(launch, 0 if dist.is_initialized() else REPORT_SECONDS)
    is_first = store.add(f"megahead/printed/{hashlib.sha256(message.encode()).hexdigest()}", 1) == 1
    store.add("megahead/reported", 1)
    return store, is_first


def _wait_until_all_reported(store: Store, world_size: int) -> None:
    while store.add("megahead/reported", 0) < world_size:
        time.sleep(0.02)


Settings = Mapping[str, str]
NO_SETTINGS: Settings = MappingProxyType({})

_MONITOR_KEY = "megahead/rank monitor"
_MAX_NAMES = 4
_DESTROY_SECONDS = 10.0


@contextmanager
def distributed_session(
    launch: Launch, device: torch.device, timeout_seconds: float, settings: Settings = NO_SETTINGS
) -> Iterator[Group]:
    """Connects all ranks of `launch` as one Group (nccl for CUDA, else gloo) until all leave the block. Collective.

    If torch.distributed is initialized already, that group is used, and not closed. Ranks wait for each other at most
    `timeout_seconds`, plus a few seconds to find out which are missing. UserError if they cannot connect or
    `settings` (values by name) differ from rank 0's, LostRankError if a rank dies, hangs or fails afterwards.
    """
    if dist.is_initialized():
        yield Group.world(timeout_seconds)
        return
    if launch.world_size == 1 and not launch.spare_ranks:
        try:
            yield Group()
        finally:
            _disconnect()  # the engine's own process group
        return
    store, monitor = _rendezvous(launch, timeout_seconds, settings)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with _report_lost_ranks(store, launch), scheduled_as_batch() if backend == "gloo" else nullcontext():
        monitor.wait_for_all()
        with _explain_no_rendezvous(launch, timeout_seconds, "connect to the others"), monitor.explain_lost_ranks():
            timeout, rank, size = timedelta(seconds=timeout_seconds), launch.rank, launch.world_size
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        with monitor.explain_lost_ranks():
            yield Group.world(timeout_seconds)
            monitor.finish()
    _disconnect()


@contextmanager
def scheduled_as_batch() -> Iterator[None]:
    """On Linux, this thread and those that it starts in the block do not preempt others when they wake up (SCHED_BATCH,
    if the policy is the default).

    By default a thread of gloo that a message wakes takes the processor of a thread that holds the connection's lock,
    and polls until the lock is free: 1,400 us an all-reduce of 64 numbers on two cores, else 500.
    """
    try:
        is_default = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_default:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # another system; a sandbox that forbids it
        is_default = False
    try:
        yield
    finally:
        if is_default:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def stand_by(launch: Launch, timeout_seconds: float, settings: Settings = NO_SETTINGS) -> None:
    """For a spare rank: waits until the training ranks have finished; LostRankError if they do not. UserError if it
    cannot connect to rank 0, or `settings` differ from rank 0's."""
    _rendezvous(launch, timeout_seconds, settings)[1].stand_by()


def _rendezvous(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, MonitorClient]:
    """The store, and this rank's connection to the monitor."""
    with _explain_no_rendezvous(launch, seconds, "be found" if launch.rank == 0 else "find rank 0 there"):
        store, connection, expected = with_timeout(seconds + 1, lambda: _connect_to_monitor(launch, seconds, settings))
    monitor = MonitorClient(connection, launch.rank, partial(_end_process, launch))
    with monitor.explain_lost_ranks():
        _require_same_settings(launch.rank, settings, expected)
    return store, monitor


def _require_same_settings(rank: int, settings: Settings, expected: Settings) -> None:
    """UserError if `settings` differ from `expected`, those of rank 0."""
    names = [name for name in {**expected, **settings} if expected.get(name) != settings.get(name)]
    if names:
        differing = [f"{name} ({settings.get(name)}, not {expected.get(name)})" for name in names[:_MAX_NAMES]]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        raise UserError(
            f"all ranks must be of one run, but rank {rank} has other settings than rank 0: {', '.join(differing)}"
            f"{more}; give them one config, or each run a rendezvous of its own (torchrun's --rdzv-id)."
        )


@contextmanager
def _report_lost_ranks(store: Store, launch: Launch) -> Iterator[None]:
    """Counts lost ranks as reported on a LostRankError, so that rank 0 does not wait for them (`print_error_once`)."""
    try:
        yield
    except LostRankError as error:
        if launch.rank == 0:
            with suppress(RuntimeError, TimeoutError):
                with_timeout(1, partial(store.add, "megahead/reported", len(error.lost)))
        raise


def _disconnect() -> None:
    if dist.is_initialized():
        with suppress(TimeoutError):
            with_timeout(_DESTROY_SECONDS, dist.destroy_process_group)


def _end_process(launch: Launch, reason: str) -> None:
    """Ends this process from the monitor client's thread, after a lost rank on which the main thread still waits."""
    print_error_once(launch, reason)
    exit_immediately(2)


@contextmanager
def _explain_no_rendezvous(launch: Launch, seconds: float, action: str) -> Iterator[None]:
    """Turns an error in the block into a UserError: this rank could not `action`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{launch.world_size} ranks must meet at {launch.address}:{launch.port} within {seconds:g} s, but rank "
            f"{launch.rank} could not {action} ({str(error).splitlines()[0]}); check MASTER_ADDR and MASTER_PORT."
        ) from error


def _connect_to_monitor(launch: Launch, seconds: float, settings: Settings) -> tuple[Store, Connection, Settings]:
    """The store, this rank's connection to the monitor (its address is in the store), and rank 0's settings."""
    store, host_timeout = open_store(launch, seconds), launch.host_timeout_seconds
    store.set_timeout(timedelta(seconds=seconds))
    host = launch.address
    if launch.rank == 0:
        monitor = RankMonitor(launch.world_size, seconds, launch.spare_ranks, host_timeout)
        store.set(_MONITOR_KEY, json.dumps([monitor.address, dict(settings)]))
        host = "127.0.0.1"
    address, expected = json.loads(store.get(_MONITOR_KEY))
    return store, connect(host, address, launch.rank, seconds, host_timeout), expected
