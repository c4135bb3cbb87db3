"""DeepSpeed's settings for GPUs and for offloading change what is where, and not what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.long import long, long_but
from support.plain_course import ROWS, Course, as_on_gpus, assert_equal, assert_near, config_of, on_mesh
from support.precisions import NEEDS_FP16
from support.small_run import write_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, "fp32"),
        (1, "bf16"),
        long(2, "fp32"),
        (3, "bf16"),
        long(0, "bf16"),
        long(1, "fp32"),
        long(2, "bf16"),
        long(3, "fp32"),
    ],
)
def test_the_settings_for_gpus_equal_plain_torch(
    tmp_path: Path, references: dict[str, Course], stage: int, precision: str
) -> None:
    """Overlapped, in contiguous buckets, gradients freed as they are summed; here over gloo."""
    write_text(tmp_path)
    ours = on_mesh(tmp_path, "headless", stage, 1, 2, **as_on_gpus(tmp_path, stage, precision))
    if precision == "fp32":
        assert_equal(ours, references["headless"])
    else:
        assert_near(ours, references["headless"], config_of(tmp_path, "headless"))


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "precision", "changes"),
    [
        ("headless", 1, 1, 1, "bf16", {}),  # sums are sent, to nobody, in fp32
        long("tied", 2, 2, 2, "fp32", {}),
        long("vanilla", 1, 2, 2, "bf16", {}),
        ("headless", 1, 2, 1, "fp32", ROWS),
        ("headless", 3, 1, 2, "bf16", ROWS),
        pytest.param("headless", 2, 1, 2, "fp16", {}, marks=NEEDS_FP16),
    ],
    ids=str,
)
def test_the_settings_for_gpus_go_with_every_mesh_objective_and_table(
    tmp_path: Path,
    references: dict[str, Course],
    objective: str,
    stage: int,
    tensor: int,
    data: int,
    precision: str,
    changes: dict[str, Any],
) -> None:
    write_text(tmp_path)
    settings = as_on_gpus(tmp_path, stage, precision, data)
    sent_in = settings["engine.deepspeed"].get("communication_data_type")
    assert sent_in == ("fp32" if (stage, data, precision) == (1, 1, "bf16") else None)
    ours = on_mesh(tmp_path, objective, stage, tensor, data, **(settings | changes))
    if precision == "fp32":
        assert_equal(ours, references[objective])
    else:
        assert_near(ours, references[objective], config_of(tmp_path, objective))


OFFLOADED = [(f"zero{stage}_offload", precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
QUICKLY_OFFLOADED = [("zero1_offload", "fp32"), ("zero2_offload", "bf16"), ("zero3_offload", "fp32")]
IN_FP16 = [(f"zero{stage}_offload", "fp16") for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "precision", "tensor"),
    long_but([(*case, 1) for case in QUICKLY_OFFLOADED], [(*case, 1) for case in OFFLOADED])
    + [pytest.param(*IN_FP16[1], 1, marks=NEEDS_FP16)]
    + [long(*case, 2) for case in OFFLOADED]
    + [long(*case, 2, marks=[NEEDS_FP16]) for case in IN_FP16],
)
def test_offloading_to_the_host_equals_plain_torch(
    tmp_path: Path, references: dict[str, Course], name: str, precision: str, tensor: int
) -> None:
    write_text(tmp_path)
    changes = {"engine.deepspeed": f"{ROOT}/configs/deepspeed/{name}.json", "engine.precision": precision}
    ours = on_mesh(tmp_path, "headless", 0, tensor, 2, **changes)
    if precision == "fp32":
        assert_equal(ours, references["headless"])
    else:
        assert_near(ours, references["headless"], config_of(tmp_path, "headless"))
