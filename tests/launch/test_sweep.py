"""`launch/sweep.sh`: task i of a job array trains line i, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path

from commands import ROOT

from megahead.config import load_config


def sweep(folder: Path, task: int) -> subprocess.CompletedProcess[str]:
    for name, text in {"srun": f'echo "$@" > {folder}/given', "scontrol": "echo node", "squeue": ""}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "17"}
    environment |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task)}
    command = ["bash", "launch/sweep.sh", "configs/small-headless.yaml", "launch/sweep.txt"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_task_trains_its_line(tmp_path: Path) -> None:
    names = []
    for task in (1, 2, 3):
        done = sweep(tmp_path, task)
        assert done.returncode == 0, done.stderr
        words = (tmp_path / "given").read_text().split()
        overrides = [word for before, word in pairwise(words) if before == "--set"]
        config = load_config(ROOT / "configs/small-headless.yaml", overrides)
        assert config.folder() == f"runs/{config.name}"
        names.append((config.name, config.optimizer.learning_rate))
    assert names == [("lr-5e-4", 5e-4), ("lr-1e-3", 1e-3), ("lr-1e-3-group", 1e-3)]


def test_a_task_without_a_line_is_told(tmp_path: Path) -> None:
    done = sweep(tmp_path, 4)
    assert done.returncode != 0
    assert "line 4 of launch/sweep.txt must hold a run" in done.stderr
