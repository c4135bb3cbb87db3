"""`launch/sweep.sh`: task i of a job array trains line i in its own folder, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from support.commands import ROOT

CONFIG = "configs/small-headless.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where sweeps are started: the commands' own files, and those that a test adds."""
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def sweep(
    folder: Path, task: int, array: int = 17, lines: str = "launch/sweep.txt", config: str = CONFIG, queue: str = ""
) -> subprocess.CompletedProcess[str]:
    """`queue`: the one task that squeue knows, and says to be running."""
    queued = f'[[ " $* " == *" {queue or None} "* ]] && echo RUNNING || {{ echo Invalid >&2; exit 1; }}'
    given = f"printf '%s\\n' \"$@\" > {folder}/given"
    for name, text in {"srun": given, "scontrol": "echo node", "squeue": queued}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "17"}
    environment |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_ARRAY_JOB_ID": str(array), "SLURM_ARRAY_TASK_ID": str(task)}
    command = ["bash", "launch/sweep.sh", config, lines]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def trained(folder: Path) -> RunConfig:
    """What srun was given, whose output_dir is the name's."""
    words = (folder / "given").read_text().splitlines()
    config = load_config(ROOT / CONFIG, [word for before, word in pairwise(words) if before == "--set"])
    assert str(config.folder()) == f"runs/{config.name}"
    return config


def test_each_task_trains_its_line(folder: Path) -> None:
    names = []
    for task in (1, 2, 3):
        done = sweep(folder, task)
        assert done.returncode == 0, done.stderr
        config = trained(folder)
        names.append((config.name, config.optimizer.learning_rate))
    assert names == [("lr-5e-4", 5e-4), ("lr-1e-3", 1e-3), ("lr-1e-3-group", 1e-3)]


@pytest.mark.parametrize("name", ["1e-3", "07", "off", "null", "2024-01-01"])
def test_a_name_is_text_whatever_yaml_reads_in_it(folder: Path, name: str) -> None:
    (folder / "names.txt").write_text(f"{name} --set seed=2\n")
    assert sweep(folder, 1, lines="names.txt").returncode == 0
    assert (trained(folder).name, trained(folder).seed) == (name, 2)


def test_comments_may_be_indented_and_lines_end_as_on_windows(folder: Path) -> None:
    (folder / "lines.txt").write_text("  # first\r\n\r\na --set seed=1\r\n\t#\r\n  b --set seed=2\r\n", newline="")
    assert sweep(folder, 2, lines="lines.txt").returncode == 0
    assert (trained(folder).name, trained(folder).seed) == ("b", 2)


def test_quotes_around_options_are_refused(folder: Path) -> None:
    (folder / "quoted.txt").write_text("a --set 'seed=2'\nb --set masking.strategy=\"uniform\"\n")
    told = refused(sweep(folder, 1, lines="quoted.txt"), folder)
    assert told.startswith("error: options of quoted.txt must have no quotes around them, but are a --set 'seed=2' ")
    assert sweep(folder, 2, lines="quoted.txt").returncode == 0  # YAML's


def test_a_task_without_a_line_is_reported(folder: Path) -> None:
    done = sweep(folder, 4)
    assert done.returncode != 0
    assert "line 4 of launch/sweep.txt must hold a run" in done.stderr


def refused(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """The sentence, and nothing was started."""
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "given").exists()
    return done.stderr


def test_two_lines_of_one_name_are_refused(folder: Path) -> None:
    (folder / "twice.txt").write_text("a --set seed=1\nb\n# a\na --set seed=2\n")
    told = refused(sweep(folder, 3, lines="twice.txt"), folder)
    assert (
        told == "error: runs of twice.txt must have names of their own, but a is there 2 times; rename all but one.\n"
    )
    assert sweep(folder, 2, lines="twice.txt").returncode == 0


def test_another_sweep_of_the_same_name_does_not_share_the_folder(folder: Path) -> None:
    (folder / "other.txt").write_text("lr-5e-4 --set optimizer.learning_rate=6e-4\n")
    assert sweep(folder, 1).returncode == 0
    (folder / "runs/lr-5e-4/checkpoints").mkdir()
    (folder / "given").unlink()
    told = refused(sweep(folder, 1, array=18, lines="other.txt"), folder)
    assert told.startswith(f"error: runs/lr-5e-4 must be trained as it was begun ({CONFIG} lr-5e-4 --set")
    assert told.endswith("optimizer.learning_rate=6e-4 instead; rename this run.\n")
    assert "must be trained as it was begun" in refused(sweep(folder, 1, array=18, config="configs/x.yaml"), folder)


def test_a_run_that_another_job_trains_is_refused_and_goes_on_when_that_is_gone(folder: Path) -> None:
    assert sweep(folder, 1).returncode == 0
    (folder / "runs/lr-5e-4/checkpoints").mkdir()
    (folder / "given").unlink()
    told = refused(sweep(folder, 1, array=18, queue="17_1"), folder)
    assert told == (
        "error: runs/lr-5e-4 must be trained by one job, but 17_1 is at it; wait for it, scancel it, or rename this "
        "run.\n"
    )
    assert sweep(folder, 1, queue="17_1").returncode == 0  # queued again by itself
    assert sweep(folder, 1, array=18).returncode == 0
    (folder / "given").unlink()
    assert "but 18_1 is at it" in refused(sweep(folder, 1, queue="18_1"), folder)


def test_a_line_that_saved_nothing_may_be_corrected(folder: Path) -> None:
    for rate in ("six", "6e-4"):
        (folder / "other.txt").write_text(f"lr --set optimizer.learning_rate={rate}\n")
        assert sweep(folder, 1, lines="other.txt").returncode == 0
    assert "6e-4" in (folder / "runs/lr/sweep.txt").read_text()
