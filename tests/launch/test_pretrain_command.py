"""`launch/pretrain.py` as users start it: by itself, under deepspeed and torchrun, rightly and wrongly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.commands import pretrain
from support.commands import CPU, DEEPSPEED, SCRIPT, TORCHRUN, config_file, free_port, losses
from support.forked import Script, fork_pythons, run_script
from support.long import long


@pytest.mark.slow
@pytest.mark.parametrize("interpreters", ["forked", long("fresh")])
def test_deepspeed_torchrun_and_bare_python_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreters: str
) -> None:
    if interpreters == "forked":
        fork_pythons(monkeypatch)
    launchers = {
        "deepspeed": [DEEPSPEED, "--num_accelerators", "2", "--master_port", free_port(), SCRIPT],
        "torchrun": [TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port(), "-m", "megahead", "pretrain"],
        "python": [SCRIPT],
    }
    curves = {}
    for name, launcher in launchers.items():
        folder = tmp_path / name
        folder.mkdir()
        options = ("--config", config_file(folder), "--set", "training.steps=4")
        done = Script(*launcher, *options, environment=CPU).done()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished at step 4" in done.stdout
        curves[name] = losses(folder)
    assert len(curves["python"]) == 4
    assert curves["deepspeed"] == pytest.approx(curves["python"], abs=1e-5)
    assert curves["torchrun"] == curves["deepspeed"]


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"LOCAL_SIZE": "2"}, 4),
        ({"LOCAL_SIZE": "16"}, 1),
        ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "8"}, 8),
        ({"LOCAL_SIZE": "1"}, 8),
        ({}, 8),
    ],
)
def test_ranks_of_one_machine_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], threads: int
) -> None:
    given = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", config_file(tmp_path)])
    monkeypatch.setattr("megahead.train.run.pretrain", lambda *_: sys.exit(f"on {given[-1]} threads"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with pytest.raises(SystemExit, match=f"on {threads} threads"):
        pretrain.run()


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGTERM, ["--stopped-code", "75"], 75),
        (signal.SIGTERM, ["--set", "parallel.elastic=true"], 75),
        (signal.SIGUSR1, [], 0),
        (signal.SIGINT, ["--stopped-code", "0"], 0),
        (signal.SIGINT, [], 130),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, options: list[str], code: int
) -> None:
    fork_pythons(monkeypatch)
    config = config_file(tmp_path, {"training.steps": 100_000, "training.evaluate_every": 100_000})
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, SCRIPT, "--config", config, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        sent = time.monotonic()
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert "stopped at step" in output
    assert time.monotonic() - sent < 20
    step = open_checkpoint(tmp_path / "run").step
    done = run_script(SCRIPT, "--config", config, "--set", f"training.steps={step + 2}")
    assert done.returncode == 0, done.stderr
    assert f"resumed     step {step}," in done.stdout
    assert open_checkpoint(tmp_path / "run").step == step + 2


def test_a_signal_after_the_end_changes_nothing(tmp_path: Path) -> None:
    code = "import signal\nfrom megahead.commands import pretrain\npretrain.run()\n"
    code += "signal.raise_signal(signal.SIGTERM)\nprint('still here')"
    (tmp_path / "then_signalled.py").write_text(code)
    done = run_script(tmp_path / "then_signalled.py", "--config", config_file(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("still here\n")


def test_dry_run_resolves_and_writes_nothing(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--config", config_file(tmp_path), "--dry-run", "--world-size", "4")
    assert done.returncode == 0, done.stderr
    assert "8 rows x 24 = 192 tokens a step; 2 rows x 1 accumulation x 4 data ranks" in done.stdout
    assert "6 steps, 1,152 tokens" in done.stdout
    assert re.search(r"^on          4 x (cpu|cuda)", done.stdout, re.MULTILINE)
    assert re.search(r"^files       all \d exist$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "model.hiden_size=3"], "did you mean `model.hidden_size`?"),
        (["--set", "data.train=nowhere"], "nowhere"),
        (["--set", "batch.global_size=7"], "`batch.global_size` must be a multiple of micro_size x data ranks"),
        (["--set", "model.vocab_size=50"], "`model.vocab_size` must be at least that of data.train (60)"),
        (["--set", "data.sequence_length=1000000", "--set", "model.max_positions=1000000"], "must hold at least"),
        (["--set", "data.tokenizer=nowhere.json"], "`data.tokenizer` must name a readable file, but is nowhere.json"),
        (["--resume", "nowhere"], "`--resume` must be auto, never or a checkpoint folder, but nowhere holds none."),
        (["--dry-run", "--world-size", "3"], "`batch.global_size` must be a multiple"),
        (["--dry-run", "--world-size", "0"], "`--world-size` must be at least 1, but is 0 instead."),
        (["--dry-run", "--stopped-code", "256"], "`--stopped-code` must be from 0 to 255, but is 256 instead."),
    ],
)
def test_mistakes_end_with_one_sentence_code_2_and_nothing_written(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    done = run_script(SCRIPT, "--config", config_file(tmp_path), *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
