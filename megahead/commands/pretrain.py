"""Pretrains, fine-tunes a head, or resumes, in one process or many; the same command again continues where it was.

megahead pretrain --config NAME.yaml [--set a.b=c ...] [--resume auto|never|DIR|URL]
megahead pretrain --config ... --dry-run [--world-size N]

On several ranks (in a checkout launch/pretrain.py is the same, and what DeepSpeed's launcher starts):
torchrun --nproc_per_node 2 -m megahead pretrain --config ...
deepspeed --num_accelerators 2 launch/pretrain.py --config ...
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megahead.config.loading import load_config
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.errors import UserError, print_error, run_command

_LEAVES = 75
"""EX_TEMPFAIL: the node leaves a run that is not at its end, as torchrun thinks when all ranks of a node exit 0."""

_INTERRUPTED = 130
"""As shells have it of what Ctrl-C ended. Ranks of a launcher leave that to the launcher, which had it as well."""


def main() -> None:
    """Ends the process; after an error at once, since other ranks may wait, and only one of them prints the error."""
    run_command(run, immediate_exit=True, report=report_once)


def run() -> None:
    arguments = parse()
    config = load_config(arguments.config, arguments.set)
    if arguments.dry_run:
        print(described(config, arguments.world_size))
        return
    share_cores(os.environ)
    from megahead.distributed.launch import read_launch
    from megahead.train.run import pretrain

    launch = read_launch(os.environ)
    done = pretrain(config, launch, arguments.resume)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a launcher's second one comes too late to change how it ended
    if done.ending == "stopped" and arguments.stopped_code is not None:
        sys.exit(arguments.stopped_code)
    if done.ending == "stopped":
        alone = launch.world_size == 1 and "WORLD_SIZE" not in os.environ
        sys.exit(_LEAVES if config.parallel.elastic else _INTERRUPTED if alone and done.interrupted else 0)


def share_cores(environment: Mapping[str, str]) -> None:
    """Leaves each rank of this machine its part of the cores under DeepSpeed's launcher, where each would take all,
    unless OMP_NUM_THREADS sets how many threads it has. torchrun gives each rank one."""
    import torch

    ranks = environment.get("LOCAL_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(ranks)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, help="the run's YAML file, or the name of one that ships")
    add("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    add("--resume", default="auto", help="auto (default), never, or a checkpoint's folder or URL")
    add("--dry-run", action="store_true", help="print the resolved run and stop")
    add("--world-size", type=int, default=1, help="ranks to assume with --dry-run")
    stopped = f"exit code after a signal (default: 0, or {_INTERRUPTED} after Ctrl-C without a launcher; "
    stopped += f"{_LEAVES} with parallel.elastic, by which other nodes go on)"
    add("--stopped-code", type=int, metavar="N", help=stopped)
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the deepspeed launcher
    return parser.parse_args()


def described(config: RunConfig, world_size: int) -> str:
    """The resolved run, and which of its files are missing; UserError for one that cannot be used."""
    from megahead.train.preflight import check_available_files, describe_files

    check_available_files(config)
    from megahead.train.describe import describe_assumed_device, describe_run

    plan = RunPlan.of(config, world_size)
    lines = [*describe_run(plan), describe_assumed_device(plan), describe_files(config)]
    return "\n".join(f"{name:<12}{value}" for name, value in lines)


def report_once(message: str) -> None:
    """Prints the error, on only one of the ranks that have it; torchrun repeats it as the last thing that it says."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # its disk may be what is full
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    if os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == "1":
        print_error(message)  # alone, without waiting for torch
        return
    from megahead.distributed.launch import print_error_once, read_launch

    try:
        launch = read_launch(os.environ)
    except UserError:
        print_error(message)
    else:
        print_error_once(launch, message)
