"""CUDA graphs of micro-steps: bit for bit what the same kernels give when they are launched one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import static_inputs
from support.gpu_run import curve
from support.small_run import same_tensors, stage, write_text

GRAPHS = {"engine.graphs": "auto", "training.steps": 12, "training.evaluate_every": 3}
BF16 = {"engine.precision": "bf16"}
MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
ENCODER = {"model.family": "bert", "model.vocab_size": 63, "model.max_positions": 32, "masking": MASKS}
ENCODER |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        stage(0),
        stage(0) | BF16,
        stage(1) | BF16,
        stage(1) | BF16 | {"engine.compile": True},
        stage(1) | BF16 | {"data.boundary_targets": False, "objective.group_samples": 1},
        stage(1) | BF16 | {"objective.name": "vanilla"},
        stage(1) | BF16 | ENCODER,
        stage(1) | BF16 | {"optimizer.name": "muon"},
    ],
    ids=str,
)
def test_a_captured_run_is_bitwise_the_one_on_static_inputs(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With evaluations and checkpoints between replays."""
    write_text(tmp_path)
    changes = GRAPHS | {"engine.deterministic": True} | changes
    static = curve(tmp_path, "cuda", changes, "static", script=static_inputs.__file__)
    assert curve(tmp_path, "cuda", changes, "captured") == static
    assert same_tensors(tmp_path / "captured", tmp_path / "static")


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "bound"), [(stage(0), 1e-3), (stage(1) | BF16, 0.05)], ids=str)
def test_a_captured_run_gives_the_curve_of_the_uncaptured_one(
    tmp_path: Path, changes: dict[str, Any], bound: float
) -> None:
    write_text(tmp_path)
    plain = curve(tmp_path, "cuda", GRAPHS | changes | {"engine.graphs": False}, "plain")
    assert curve(tmp_path, "cuda", GRAPHS | changes, "captured") == pytest.approx(plain, abs=bound)


@pytest.mark.gpu
def test_a_captured_run_resumed_is_bitwise_the_undisturbed_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = GRAPHS | stage(1) | BF16 | {"engine.deterministic": True}
    whole = curve(tmp_path, "cuda", changes, "whole")
    half = str(tmp_path / "whole/checkpoints/step-00000006")
    assert curve(tmp_path, "cuda", changes, "resumed", half) == whole[6:]
    assert same_tensors(tmp_path / "whole", tmp_path / "resumed")
