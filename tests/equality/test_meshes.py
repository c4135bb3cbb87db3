"""Every ZeRO stage on every mesh trains what one plain torch process does: losses, gradient norms, weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.long import long, long_but
from support.plain_course import Course, assert_equal, on_mesh
from support.small_run import write_text

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]
MATRIX = [(o, stage, *mesh) for o in ("headless", "vanilla") for stage in (0, 1, 2, 3) for mesh in MESHES]
MATRIX += [("tied", stage, 2, 2) for stage in (0, 1, 2, 3)]
QUICK = [("headless", stage, 1, 2) for stage in (0, 1, 2, 3)] + [("vanilla", 3, 2, 1)]
QUICK += [("headless", 0, 1, 1), ("headless", 1, 2, 2)]
"""Every stage on two data ranks, stage 3 on tensor ranks, and both kinds of rank at once."""


@pytest.mark.parametrize(("objective", "stage", "tensor", "data"), long_but(QUICK, MATRIX))
def test_fp32_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], objective: str, stage: int, tensor: int, data: int
) -> None:
    write_text(tmp_path)
    ours, reference = on_mesh(tmp_path, objective, stage, tensor, data), references[objective]
    assert min(reference.norms) > 0.5, "clipping is not active"
    assert_equal(ours, reference)


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "recompute"),
    [long("headless", stage, 2, 2, stage % 2 == 0) for stage in (0, 1, 2, 3)]
    + [long("vanilla", 1, 2, 2, True), long("vanilla", 3, 2, 2, True), ("vanilla", 1, 2, 1, False)]
    + [
        long("headless", 0, 2, 1, True),
        long("headless", 3, 2, 1, True),
        ("headless", 1, 2, 1, True),
        ("headless", 0, 1, 1, False),
    ],
)
def test_sequence_parallelism_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], objective: str, stage: int, tensor: int, data: int, recompute: bool
) -> None:
    write_text(tmp_path)
    changes = {"parallel.sequence": True, "engine.activation_checkpointing": recompute}
    assert_equal(on_mesh(tmp_path, objective, stage, tensor, data, **changes), references[objective])


@pytest.mark.parametrize(
    ("recompute", "stage", "data"),
    [(True, 0, 1), long(True, 3, 1), ("selective", 2, 1)]
    + [long(True, stage, 2) for stage in (0, 1, 2, 3)]
    + [long("selective", stage, 2) for stage in (0, 2)],
)
def test_activation_checkpointing_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], recompute: bool | str, stage: int, data: int
) -> None:
    write_text(tmp_path)
    ours = on_mesh(tmp_path, "headless", stage, 2, data, **{"engine.activation_checkpointing": recompute})
    assert_equal(ours, references["headless"])
