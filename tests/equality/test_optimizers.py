"""Muon, and a rate of its own for the table, step as they do in one plain torch process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.long import long
from support.plain_course import (
    Course,
    assert_equal,
    assert_near,
    config_of,
    on_mesh,
    plain_torch,
)
from support.small_run import write_text

ROOT = Path(__file__).parents[2]
RATED = {"optimizer.table": {"learning_rate_ratio": 4}, "model.init_embedding_std": 0.3}


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data"),
    [long("vanilla", stage, 2, 2) for stage in (0, 1, 2, 3)]
    + [("headless", 0, 1, 1), ("vanilla", 1, 2, 1), long("vanilla", 2, 1, 2), ("tied", 3, 1, 2)],
)
def test_a_rate_for_table_and_head_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], objective: str, stage: int, tensor: int, data: int
) -> None:
    write_text(tmp_path)
    reference = plain_torch(config_of(tmp_path, objective, **RATED))
    assert abs(reference.losses[-1] - references[objective].losses[-1]) > 0.01
    assert_equal(on_mesh(tmp_path, objective, stage, tensor, data, **RATED), reference)


MUON = {"optimizer.name": "muon", "optimizer.table": {"learning_rate_ratio": 2}}


@pytest.mark.parametrize(
    ("stage", "tensor", "data", "changes"),
    [long(stage, 2, 2, {}) for stage in (0, 1, 2, 3)]
    + [
        (0, 1, 1, {}),
        long(2, 2, 1, {}),
        long(3, 1, 2, {}),
        (1, 1, 2, {"model.family": "llama", "model.num_key_heads": 1}),
        (2, 2, 1, {"engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_muon_stays_near_plain_torch(
    tmp_path: Path, stage: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    """Near, since gradients that are added up otherwise are rounded to other bf16 numbers."""
    write_text(tmp_path)
    config = config_of(tmp_path, "headless", **MUON | changes | {"engine.embedding": "dense"})
    assert_near(on_mesh(tmp_path, "headless", stage, tensor, data, **MUON | changes), plain_torch(config), config)


@pytest.mark.parametrize(("name", "precision"), [("zero2_offload", "fp32"), long("zero3_offload", "bf16")])
def test_muon_beside_offloading_stays_near_plain_torch(tmp_path: Path, name: str, precision: str) -> None:
    write_text(tmp_path)
    changes = {"engine.deepspeed": f"{ROOT}/configs/deepspeed/{name}.json", "engine.precision": precision, **MUON}
    config = config_of(tmp_path, "headless", **MUON)
    assert_near(on_mesh(tmp_path, "headless", 0, 1, 2, **changes), plain_torch(config), config)
