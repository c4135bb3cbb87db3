"""The training command on a CUDA device, against the same run on the CPU in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_run import same_tensors, small_config, stage, write_text

from megahead.report.metrics import read_metrics

SCRIPT = str(Path(__file__).parents[2] / "launch/pretrain.py")


def curve(folder: Path, device: str, changes: dict[str, Any], name: str = "", resume: str = "auto") -> list[float]:
    """Losses of the run `folder`/NAME (else the device's name)."""
    run = folder / (name or device)
    given = {"engine.device": device, "output_dir": str(run), "training.steps": 20} | changes
    path = folder / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(small_config(folder, given).model_dump(mode="json")))
    command = [sys.executable, SCRIPT, "--config", str(path), "--resume", resume]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["loss"] for record in read_metrics(run).training]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "zero", "bound"),
    [("fp32", 0, 1e-3), ("fp32", 3, 1e-3), ("bf16", 0, 0.1), ("bf16", 1, 0.1), ("bf16", 3, 0.1)],
)
def test_a_gpu_gives_the_curve_of_the_cpu(tmp_path: Path, precision: str, zero: int, bound: float) -> None:
    write_text(tmp_path)
    cpu = curve(tmp_path, "cpu", stage(zero))
    assert curve(tmp_path, "cuda", stage(zero) | {"engine.precision": precision}) == pytest.approx(cpu, abs=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_deterministic_run_resumed_is_bitwise_the_undisturbed_one(tmp_path: Path, zero: int) -> None:
    write_text(tmp_path)
    changes = stage(zero) | {"engine.deterministic": True, "engine.precision": "bf16", "training.steps": 9}
    whole = curve(tmp_path, "cuda", changes, "whole")
    half = str(tmp_path / "whole/checkpoints/step-00000003")
    assert curve(tmp_path, "cuda", changes, "resumed", half) == whole[3:]
    assert same_tensors(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.gpu
def test_fp16_learns_with_loss_scaling(tmp_path: Path) -> None:
    write_text(tmp_path)
    losses = curve(tmp_path, "cuda", stage(1) | {"engine.precision": "fp16"})
    assert losses[-1] < losses[0]
