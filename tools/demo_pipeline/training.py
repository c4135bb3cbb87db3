"""Runs `launch/pretrain.py` as anybody would, under DeepSpeed's launcher, and passes on what a person wants to read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from demo_pipeline.launcher import environment, launcher
from megahead.config.loading import load_config
from megahead.errors import UserError
from megahead.report.read import read_metrics

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER_NOTE = re.compile(r"^\[\d{4}-\d\d-\d\d .*\[(INFO|WARNING)\]")


def ranks() -> int:
    """Two where there are two cores or two GPUs, else one."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    return min(2, there)


def train(config: str, overrides: Sequence[str], console: Console) -> None:
    """Trains `configs/CONFIG.yaml`, resuming what an earlier call began.

    Raises UserError with the last lines it printed when it fails.
    """
    command = [sys.executable, *launcher(ranks()), "launch/pretrain.py", "--config", f"configs/{config}.yaml"]
    for override in overrides:
        command += ["--set", override]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            if line and not _LAUNCHER_NOTE.match(line):
                lines.append(line)
                console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if process.returncode:
        raise UserError("training must end by itself, but failed; its last lines:\n" + "\n".join(lines[-15:]))


def seconds_per_step(config: str, overrides: Sequence[str], console: Console) -> float:
    """Measured over a few steps of a run that is thrown away."""
    trial = ["training.steps=16", "training.log_seconds=0", "schedule.warmup_steps=0", "data.validation=null"]
    scratch = load_config(f"configs/{config}.yaml", overrides).folder()
    train(config, [*overrides, *trial], console)
    steps: list[float] = [record["step_seconds"] for record in read_metrics(scratch.path).training]
    shutil.rmtree(scratch)
    return sorted(steps)[len(steps) // 2]
