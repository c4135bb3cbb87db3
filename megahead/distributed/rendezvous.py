"""How ranks find each other: `read_launch` reads a launcher's settings, `open_store` opens the store they share.

`deepspeed`, `torchrun` and `srun` pass a process its rank in environment variables; `read_launch` takes them as a
mapping, so that nothing below `launch/` reads the environment itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megahead.errors import UserError

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


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


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that `environment` describes; a single process when it describes none.

    Raises UserError naming the variable that is missing or not a number.
    """
    source = {name: environment.get(name, environment.get(_SLURM[name], "")) for name in _SLURM}
    if "LOCAL_RANK" not in environment and _has_a_device_of_its_own(environment):
        source["LOCAL_RANK"] = "0"
    if not source["WORLD_SIZE"] and environment.get("RANK"):
        raise UserError(_missing("WORLD_SIZE", f"RANK is {environment['RANK']}"))
    if not source["WORLD_SIZE"] or source["WORLD_SIZE"] == "1":
        return Launch()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        source[name] = environment.get(name, "")
    missing = [name for name, value in source.items() if not value]
    if missing:
        raise UserError(_missing(missing[0], f"WORLD_SIZE is {source['WORLD_SIZE']}"))
    numbers = {name: value for name, value in source.items() if name != "MASTER_ADDR"}
    wrong = [name for name, value in numbers.items() if not value.isdecimal()]
    if wrong:
        raise UserError(
            f"`{wrong[0]}` must be a whole number in the environment, but is {numbers[wrong[0]]!r} instead."
        )
    rank, world_size, local_rank, port = (int(numbers[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    if rank >= world_size:
        raise UserError(f"`RANK` must be below WORLD_SIZE ({world_size}), but is {rank} instead.")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(rank, world_size, local_rank, source["MASTER_ADDR"], port, int(attempt) if attempt.isdecimal() else 0)


def _has_a_device_of_its_own(environment: Mapping[str, str]) -> bool:
    """Whether srun gave this task one GPU of its own (`--gpus-per-task`, `--gpu-bind`), whose number is then 0."""
    return "SLURM_PROCID" in environment and "," not in environment.get("CUDA_VISIBLE_DEVICES", ",")


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
