"""Pretrains, trains a head for a headless model, or resumes; in one process or many. The same command resumes a run.

megahead pretrain --config NAME.yaml [--set a.b=c ...] [--resume auto|never|DIR|URL]
megahead pretrain --config ... --dry-run [--world-size N]

On several ranks (launch/pretrain.py in a checkout is the same, for DeepSpeed's launcher):
torchrun --nproc_per_node 2 -m megahead pretrain --config ...
deepspeed --num_accelerators 2 launch/pretrain.py --config ...
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping

from megahead.commands import report_once
from megahead.config.loading import load_config
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.errors import FieldError, require_at_least, run_command

_LEAVE_CODE = 75
"""EX_TEMPFAIL: this node leaves an elastic run, which continues. torchrun would end the run if all ranks exited
with 0."""

_INTERRUPT_CODE = 130
"""The shell convention for Ctrl-C. Not used under a launcher, which gets the signal as well."""


def main() -> None:
    """Runs the command and exits, immediately after an error, since threads may wait for other ranks."""
    run_command(run, immediate_exit=True, report=report_once)


def run() -> None:
    arguments = parse_arguments()
    require_at_least(1, world_size=arguments.world_size)
    if arguments.stopped_code is not None and not 0 <= arguments.stopped_code < 256:  # exit codes are bytes
        raise FieldError("--stopped-code", "be from 0 to 255", got=arguments.stopped_code)
    config = load_config(arguments.config, arguments.set)
    if arguments.dry_run:
        print(describe(config, arguments.world_size, arguments.resume))
        return
    split_cores(os.environ)
    from megahead.distributed.launch import read_launch
    from megahead.train.run import pretrain

    launch = read_launch(os.environ)
    result = pretrain(config, launch, arguments.resume)
    for signal_number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, signal.SIG_IGN)  # a launcher's second signal must not change the exit code
    if result.ending == "stopped" and arguments.stopped_code is not None:
        sys.exit(arguments.stopped_code)
    if result.ending == "stopped":
        ctrl_c = result.interrupted and launch.world_size == 1 and "WORLD_SIZE" not in os.environ
        sys.exit(_LEAVE_CODE if config.parallel.elastic else _INTERRUPT_CODE if ctrl_c else 0)


def split_cores(environment: Mapping[str, str]) -> None:
    """Divides this machine's cores among its ranks under DeepSpeed's launcher, where each rank would use all, unless
    OMP_NUM_THREADS is set. torchrun gives each rank one thread."""
    import torch

    ranks = environment.get("LOCAL_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(ranks)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, help="the run's YAML file, or the name of one that ships")
    add("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    add("--resume", default="auto", help="auto (default), never, or a checkpoint's folder or URL")
    add("--dry-run", action="store_true", help="print the resolved run and stop")
    add("--world-size", type=int, default=1, help="ranks to assume with --dry-run")
    stopped = f"exit code after a signal (default: 0, or {_INTERRUPT_CODE} after Ctrl-C without a launcher; "
    stopped += f"{_LEAVE_CODE} with parallel.elastic, so that other nodes continue)"
    add("--stopped-code", type=int, metavar="N", help=stopped)
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the deepspeed launcher
    return parser.parse_args()


def describe(config: RunConfig, world_size: int, resume: str = "auto") -> str:
    """The resolved run and its missing files; UserError for a file that cannot be used, or a checkpoint of another
    run."""
    from megahead.train.preflight import check_available_files, describe_assumed_device, describe_files, describe_run

    check_available_files(config)
    plan, resumes = RunPlan.of(config, config.usable_ranks(world_size)), config.training.saves_elsewhere()
    if resume != "auto" or config.folder().checkpoints.is_dir():
        from megahead.train.start import check_resumed_settings  # needs torch

        resumes |= check_resumed_settings(config, resume)
    lines = [*describe_run(plan), describe_assumed_device(plan), describe_files(config, resumes=resumes)]
    return "\n".join(f"{name:<12}{value}" for name, value in lines)
