"""Runs whose ranks are processes that may be killed, stopped or hung: forked, hence instant, joined as real ones."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import support.heavy_imports  # noqa: F401 - else every rank would load it again
from megahead.config.run import RunConfig
from megahead.distributed.launch import Launch, print_error_once
from megahead.errors import run_command
from megahead.train.run import pretrain
from support.commands import free_port

Sabotage = Callable[[int], None]
"""Called in each rank, with its number, before it starts."""


def start_ranks(
    config: RunConfig, count: int, folder: Path, resume: str = "auto", sabotage: Sabotage = lambda rank: None
) -> list[BaseProcess]:
    """`count` ranks of a run that find each other over TCP; what rank r says goes to `folder`/rank-r.log."""
    port = int(free_port())
    context = multiprocessing.get_context("fork")
    launches = [Launch(rank, count, rank, "127.0.0.1", port) for rank in range(count)]
    ranks = [context.Process(target=_rank, args=(config, launch, folder, resume, sabotage)) for launch in launches]
    for rank in ranks:
        rank.start()
    return ranks


def _rank(config: RunConfig, launch: Launch, folder: Path, resume: str, sabotage: Sabotage) -> None:
    speak_to(folder / f"rank-{launch.rank}.log")
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)

    def main() -> None:
        sabotage(launch.rank)
        pretrain(config, launch, resume)
        os._exit(0)

    run_command(main, immediate_exit=True, report=partial(print_error_once, launch))


def speak_to(log: Path) -> None:
    """From here on both outputs of this process go to `log` (and no more to pytest)."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for output in (1, 2):
        os.dup2(descriptor, output)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def codes(ranks: list[BaseProcess], seconds: float = 60) -> list[int | None]:
    """Exit codes, once all have ended; those that have not after `seconds` say where they stand, are killed and have
    None."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    ended = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.is_alive() and rank.pid:
            os.kill(rank.pid, signal.SIGUSR2)
            time.sleep(0.5)
        rank.kill()
        rank.join()
    return ended


def said(folder: Path, rank: int) -> str:
    """What a rank said on both its outputs."""
    return (folder / f"rank-{rank}.log").read_text(errors="replace")
