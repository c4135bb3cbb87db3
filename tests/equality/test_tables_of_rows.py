"""A table of which each step reads and writes a few rows trains what plain torch does with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.report.read import read_metrics
from support.long import long, long_but
from support.plain_course import ROWS, Course, assert_equal, assert_near, config_of, on_mesh
from support.precisions import NEEDS_FP16
from support.small_run import write_text

ROOT = Path(__file__).parents[2]
ROWS_MATRIX = [(stage, 2, 2) for stage in (0, 1, 2, 3)] + [
    (0, 1, 1),
    (0, 1, 2),
    (1, 1, 2),
    (3, 1, 2),
    (1, 1, 4),
    (2, 2, 1),
]


@pytest.mark.parametrize(("stage", "tensor", "data"), long_but([(0, 1, 1), (1, 1, 2), (3, 1, 2)], ROWS_MATRIX))
def test_a_table_of_rows_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], stage: int, tensor: int, data: int
) -> None:
    write_text(tmp_path)
    assert_equal(on_mesh(tmp_path, "headless", stage, tensor, data, **ROWS), references["headless"])


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (
            1,
            {f"objective.{n}": v for n, v in {"group_samples": 4, "negatives": 5, "negatives_from": "uniform"}.items()},
        ),
        (3, {"objective.learned_temperature": True, "objective.bias": "own_once"}),
        long(2, {"parallel.sequence": True, "engine.activation_checkpointing": True}),
        long(0, {"batch.micro_size": 2, "data.prefetch": 0}),
        long(1, {"optimizer.table": {"learning_rate_ratio": 4}}),
    ],
)
@pytest.mark.parametrize("tensor", [1, long(2)])
def test_a_table_of_rows_goes_with_everything_else(
    tmp_path: Path, stage: int, changes: dict[str, Any], tensor: int
) -> None:
    """Two runs, dense and with rows, equal in what they log, and in what held-out text is given. Few tokens a step, so
    that rows are stale."""
    courses, held_out = [], []
    changes = {"data.sequence_length": 8, "batch.global_size": 4, "batch.micro_size": 1, **changes}
    for kind in ("dense", "rows"):
        (tmp_path / kind).mkdir()
        write_text(tmp_path / kind)
        mesh = (2, 1) if tensor == 1 and "parallel.sequence" in changes else (tensor, 2)
        courses.append(on_mesh(tmp_path / kind, "headless", stage, *mesh, **changes | {"engine.embedding": kind}))
        held_out.append(read_metrics(tmp_path / kind / "run").validation[-1]["loss"])
    assert_equal(courses[1], courses[0])
    assert read_metrics(tmp_path / "rows/run").training[-1]["rows_late"] > 0
    assert held_out[1] == pytest.approx(held_out[0], abs=1e-5)


@pytest.mark.parametrize("name", [long("zero1_offload"), "zero2_offload", long("zero3_offload")])
def test_a_table_of_rows_beside_offloading_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], name: str
) -> None:
    write_text(tmp_path)
    changes = {"engine.deepspeed": f"{ROOT}/configs/deepspeed/{name}.json", **ROWS}
    assert_equal(on_mesh(tmp_path, "headless", 0, 1, 2, **changes), references["headless"])


@pytest.mark.parametrize(
    ("precision", "stage"),
    [
        long("bf16", 0),
        long("bf16", 1),
        long("bf16", 2),
        ("bf16", 3),
        pytest.param("fp16", 1, marks=NEEDS_FP16),
        long("fp16", 3, marks=[NEEDS_FP16]),
    ],
)
def test_a_table_of_rows_in_half_precision_stays_near_plain_torch(
    tmp_path: Path, references: dict[str, Course], precision: str, stage: int
) -> None:
    write_text(tmp_path)
    ours = on_mesh(tmp_path, "headless", stage, 1, 2, **ROWS | {"engine.precision": precision})
    assert_near(ours, references["headless"], config_of(tmp_path, "headless"))
