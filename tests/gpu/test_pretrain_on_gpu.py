"""The training command on a CUDA device, against the same run on the CPU in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_run import small_config, stage, write_text

from megahead.report.metrics import read_metrics

SCRIPT = str(Path(__file__).parents[2] / "launch/pretrain.py")


def curve(folder: Path, device: str, precision: str, zero: int) -> list[float]:
    changes = stage(zero) | {"engine.device": device, "engine.precision": precision, "output_dir": str(folder / device)}
    path = folder / f"{device}.yaml"
    path.write_text(yaml.safe_dump(small_config(folder, changes | {"training.steps": 20}).model_dump(mode="json")))
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--config", str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["loss"] for record in read_metrics(folder / device).training]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "zero", "bound"),
    [("fp32", 0, 1e-3), ("fp32", 3, 1e-3), ("bf16", 0, 0.1), ("bf16", 1, 0.1), ("bf16", 3, 0.1)],
)
def test_a_gpu_gives_the_curve_of_the_cpu(tmp_path: Path, precision: str, zero: int, bound: float) -> None:
    write_text(tmp_path)
    cpu = curve(tmp_path, "cpu", "fp32", zero)
    assert curve(tmp_path, "cuda", precision, zero) == pytest.approx(cpu, abs=bound)


@pytest.mark.gpu
def test_fp16_learns_with_loss_scaling(tmp_path: Path) -> None:
    write_text(tmp_path)
    losses = curve(tmp_path, "cuda", "fp16", 1)
    assert losses[-1] < losses[0]
