"""The training command on a CUDA device, against the same run on the CPU in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gpu_run import curve
from support.small_run import same_tensors, stage, write_text


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
@pytest.mark.parametrize(("precision", "zero", "bound"), [("fp32", 0, 1e-3), ("bf16", 1, 0.1), ("bf16", 3, 0.1)])
def test_a_gpu_gives_the_curve_of_the_cpu_in_rows(tmp_path: Path, precision: str, zero: int, bound: float) -> None:
    write_text(tmp_path)
    cpu = curve(tmp_path, "cpu", stage(zero))
    changes = stage(zero) | {"engine.precision": precision, "engine.embedding": "rows"}
    assert curve(tmp_path, "cuda", changes) == pytest.approx(cpu, abs=bound)


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
