"""How ranks find each other: `read_launch` reads a launcher's settings, `open_store` opens the store they share.

`deepspeed`, `torchrun` and `srun` pass a process its rank in environment variables; `read_launch` takes them as a
mapping, so that nothing below `launch/` reads the environment itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megahead.errors import UserError

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}

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

    restarts: bool = False
    """Whether the launcher (torchrun with --max-restarts) starts ranks again when some are lost or come."""

    keeps_store: bool = False
    """Whether the launcher (torchrun by default) keeps one store, at one address, however often ranks meet again."""

    job_tasks: int = 0
    """Tasks of the Slurm job (SLURM_NTASKS) in whose shell or batch script this process runs alone, without srun."""

    host_timeout_seconds: float | None = None
    """A machine that does not answer for so long is lost; None: only whether its ranks take part counts."""

    def using(self, ranks: int, timeout_seconds: float) -> Launch:
        """The same, but only the first `ranks` train, and others can take the place of a lost machine."""
        return replace(
            self, world_size=ranks, spare_ranks=self.world_size - ranks, host_timeout_seconds=timeout_seconds
        )


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that `environment` describes; a single process when it describes none.

    A task of srun has its place from Slurm, unless a launcher in it says another. SLURM_NTASKS says nothing of a
    process: shells of salloc and scripts of sbatch have it, too, and run one. Raises UserError naming the variable that
    is missing, not a number, or contradicts others.
    """
    task = _is_task(environment)
    rank, size, local_rank = (slurm if task and name not in environment else name for name, slurm in _SLURM.items())
    values = {name: environment.get(name, "") for name in (rank, size, local_rank, "MASTER_ADDR", "MASTER_PORT")}
    if not values[size] and values[rank]:
        raise UserError(_missing(size, f"{rank} is {values[rank]}"))
    if not values[size]:
        return Launch(**_torchrun(environment), job_tasks=_number(environment, "SLURM_NTASKS"))
    if values[size] == "1":
        return Launch(**_torchrun(environment))
    if local_rank == "SLURM_LOCALID" and _has_a_device_of_its_own(environment):
        values[local_rank] = "0"
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
    """What torchrun's agent tells beside a rank's place; each node's counts its own restarts, and not the others'."""
    keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {
        "attempt": _number(environment, "TORCHELASTIC_RESTART_COUNT") if keeps_store else 0,
        "ranks_per_node": _number(environment, "LOCAL_WORLD_SIZE"),
        "restarts": _number(environment, "TORCHELASTIC_MAX_RESTARTS") > 0,
        "keeps_store": keeps_store,
    }


def _has_a_device_of_its_own(environment: Mapping[str, str]) -> bool:
    """Whether srun gave this task one GPU of its own (`--gpus-per-task`, `--gpu-bind`), whose number is then 0."""
    return "," not in environment.get("CUDA_VISIBLE_DEVICES", ",")


def _missing(name: str, when: str) -> str:
    return (
        f"`{name}` must be set in the environment when {when}, but is missing; start through deepspeed, torchrun or "
        "srun, or export it."
    )


def choose_device(asked: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device; `auto` takes CUDA if there is a device. Makes it torch's current device."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise UserError(
            "`engine.device` must be cpu or auto on this machine, but is cuda instead; torch sees no CUDA device."
        )
    if asked == "cpu" or not there:
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
