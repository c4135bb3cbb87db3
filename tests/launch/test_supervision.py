"""What starts a run again: torchrun after a rank died, Slurm's queue after a run was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import CPU, ROOT, TORCHRUN, config_file, free_port
from support.forked import Script, fork_pythons
from support.killable import codes, start_ranks
from support.long import long
from support.small_run import same_tensors, small_config

CRASH_ONCE = """
import os, runpy, sys
from megahead.train.log import RunLogger

note = RunLogger.log_step
def noted(logger, report, state, **kwargs):
    note(logger, report, state, **kwargs)
    if state.step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
RunLogger.log_step = noted
runpy.run_path("launch/pretrain.py", run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_and_they_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch/supervised.sh`, but for a training script one of whose ranks dies in the first attempt."""
    script = tmp_path / "crash_once.py"
    script.write_text(CRASH_ONCE)
    command = (ROOT / "launch/supervised.sh").read_text().replace("launch/pretrain.py", str(script))
    assert "exec .venv/bin/torchrun " in command
    told = command.replace("exec .venv/bin/torchrun ", "printf '%s\\n' ").replace(".venv/bin/python", sys.executable)
    environment = {**os.environ, "RANKS": "2", "RESTARTS": "1"}
    options = subprocess.check_output(["bash", "-c", told, "supervised", config_file(tmp_path)], env=environment)
    refused = told.replace(sys.executable, "false")
    assert subprocess.run(["bash", "-c", refused, "supervised", config_file(tmp_path)], env=environment).returncode == 1
    fork_pythons(monkeypatch)
    done = Script(TORCHRUN, *options.decode().splitlines(), environment=CPU).done()
    assert done.returncode == 0, done.stdout + done.stderr
    by_torchrun = "failed (exitcode: 9) local_rank: 1"  # which may end the other rank before that can speak
    assert "rank 1 died" in done.stderr or by_torchrun in done.stderr
    assert "resumed     step 3" in done.stdout
    assert "finished at step 6" in done.stdout
    undisturbed = small_config(tmp_path, {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("interpreters", ["forked", long("fresh")])
def test_a_node_of_an_elastic_run_trains_with_the_ranks_that_its_batch_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreters: str
) -> None:
    config, script, arguments = config_file(tmp_path), tmp_path / "elastic.sh", tmp_path / "arguments"
    command = (ROOT / "launch/elastic.sh").read_text().replace(".venv/bin/", "")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANKS": "3", "NODES": "1:1", "ADDRESS": "127.0.0.1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    if interpreters == "forked":  # the script says what it would start
        command = command.replace("exec python ", f"env > {arguments}.env; printf '%s\\n' > {arguments} ")
    script.write_text(command)
    call = ["bash", script, f"127.0.0.1:{free_port()}", config]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    if interpreters == "forked":
        fork_pythons(monkeypatch)
        told = dict(line.split("=", 1) for line in Path(f"{arguments}.env").read_text().splitlines() if "=" in line)
        done = Script(*arguments.read_text().splitlines(), environment=told).done()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "elastic     2 of 3 ranks train" in done.stdout
    assert "rank 2 waits: 8 rows a step in micro-batches of 2 can be split over 2 of 3 ranks" in done.stdout
    assert "finished at step 6" in done.stdout
    alone = small_config(tmp_path, {"output_dir": str(tmp_path / "alone")})
    assert codes(start_ranks(alone, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("name", ["elastic.sh HOST:1", "supervised.sh"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("model.hiden_size=3", "`model.hiden_size` is not a setting; did you mean `model.hidden_size`?"),
        ("data.train=nowhere/text", "files       missing: nowhere/text.bin, nowhere/text.idx"),
        ("data.tokenizer=nowhere.json", "files       missing: nowhere.json"),
    ],
)
def test_a_mistake_that_each_start_would_repeat_is_told_before_torchrun(
    tmp_path: Path, name: str, setting: str, told: str
) -> None:
    script, *first = name.split()
    command = (ROOT / "launch" / script).read_text().replace(".venv/bin/python", sys.executable)
    command = command.replace("exec ", "echo started; exit 0; ")
    call = ["bash", "-c", command, script, *first, config_file(tmp_path), "--set", setting]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "RANKS": "2"}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].strip() == told


def test_all_restarts_of_supervised_ranks_are_one_launch_and_two_calls_are_two() -> None:
    command = (ROOT / "launch/supervised.sh").read_text().replace(".venv/bin/python", "true")
    call = ["bash", "-c", command.replace("exec .venv/bin/torchrun", "echo $LAUNCH_ID:"), "supervised", "run.yaml"]
    told = [subprocess.check_output(call, text=True).partition(":")[0] for _ in range(2)]
    assert all(told)
    assert told[0] != told[1]


@pytest.mark.parametrize(
    ("ending", "saved", "state", "requeued"),
    [
        ("finished", True, "RUNNING", False),
        ("out of time", True, "RUNNING", False),
        ("stopped", True, "RUNNING", True),  # the time limit comes near
        ("stopped", True, "COMPLETING", False),  # scancel
        ("", True, "RUNNING", True),  # died on its way
        ("", False, "RUNNING", False),  # a wrong setting, for one
    ],
)
@pytest.mark.parametrize("task", ["", "3"])
def test_slurm_queues_again_what_the_time_limit_stopped_or_what_died_on_its_way(
    tmp_path: Path, ending: str, saved: bool, state: str, requeued: bool, task: str
) -> None:
    """With stand-ins for Slurm's commands."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/latest").write_text("step-00000001")
    mark = f"""printf '{{"ending": "{ending}", "step": 3, "steps": 6}}' > {run}/ending.json""" if ending else "exit 1"
    save = f"echo step-00000003 > {run}/checkpoints/latest" if saved else ""
    commands = {
        "srun": f'echo "$LAUNCH_ID $@" > {tmp_path}/given\n{save}\n{mark}',
        "scontrol": f'echo "$@" >> {tmp_path}/asked',
        "squeue": f'echo "$@" >> {tmp_path}/asked; echo {state}',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "17"}
    environment |= {"SLURM_CPUS_PER_TASK": "1"}
    environment |= {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": task} if task else {}
    command = ["bash", ROOT / "launch/slurm.sh", run, "configs/x.yaml", "--set", "seed=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if ending else 1), done.stderr
    assert f"--config configs/x.yaml --set seed=2 --set output_dir='{run}'" in (tmp_path / "given").read_text()
    assert (tmp_path / "given").read_text().startswith("17 ")
    asked = (tmp_path / "asked").read_text()
    assert ("requeue" in asked) is requeued
    assert (f"requeue {'15_3' if task else '17'}\n" in asked) is requeued


@pytest.mark.parametrize("arguments", [(), ("runs/x", "configs/x.yaml")])
@pytest.mark.parametrize("script", ["slurm.sh", "sweep.sh"])
def test_a_job_without_arguments_or_slurm_says_how_it_is_called(script: str, arguments: tuple[str, ...]) -> None:
    command = ["bash", ROOT / "launch" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch ")
