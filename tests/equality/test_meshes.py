"""Every ZeRO stage on every mesh trains what one plain torch process does: losses, gradient norms, weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.plain_course import Course, assert_equal, on_mesh
from support.small_run import write_text

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]
MATRIX = [(o, stage, *mesh) for o in ("headless", "vanilla") for stage in (0, 1, 2, 3) for mesh in MESHES]
MATRIX += [("tied", stage, 2, 2) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("objective", "stage", "tensor", "data"), MATRIX)
def test_fp32_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], objective: str, stage: int, tensor: int, data: int
) -> None:
    write_text(tmp_path)
    ours, reference = on_mesh(tmp_path, objective, stage, tensor, data), references[objective]
    assert min(reference.norms) > 0.5, "clipping is not active"
    assert_equal(ours, reference)


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "recompute"),
    [("headless", stage, 2, 2, stage % 2 == 0) for stage in (0, 1, 2, 3)]
    + [("vanilla", 1, 2, 2, True), ("vanilla", 3, 2, 2, True), ("headless", 0, 2, 1, True), ("headless", 3, 2, 1, True)]
    + [("headless", 0, 1, 1, False)],
)
def test_sequence_parallelism_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], objective: str, stage: int, tensor: int, data: int, recompute: bool
) -> None:
    write_text(tmp_path)
    changes = {"parallel.sequence": True, "engine.activation_checkpointing": recompute}
    assert_equal(on_mesh(tmp_path, objective, stage, tensor, data, **changes), references[objective])


@pytest.mark.parametrize(
    ("recompute", "stage"), [(True, 0), (True, 1), (True, 2), (True, 3), ("selective", 0), ("selective", 2)]
)
def test_activation_checkpointing_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], recompute: bool | str, stage: int
) -> None:
    write_text(tmp_path)
    ours = on_mesh(tmp_path, "headless", stage, 2, 2, **{"engine.activation_checkpointing": recompute})
    assert_equal(ours, references["headless"])
