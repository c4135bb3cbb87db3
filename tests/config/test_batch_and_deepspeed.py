"""The batch triad, and how it is written into DeepSpeed's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import small_config, stage

from megahead.config import BatchConfig, deepspeed_config


@pytest.mark.parametrize(("ranks", "steps"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_accumulation_fills_the_global_batch(ranks: int, steps: int) -> None:
    assert BatchConfig(global_size=48, micro_size=4).accumulation_steps(ranks) == steps


def test_the_triad_and_clipping_are_written_for_deepspeed(tmp_path: Path) -> None:
    content = deepspeed_config(small_config(tmp_path, stage(1)), data_ranks=2)
    assert content["train_batch_size"] == 8
    assert content["train_micro_batch_size_per_gpu"] == 2
    assert content["gradient_accumulation_steps"] == 2
    assert content["gradient_clipping"] == 1.0
    assert content["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("zero", "precision", "keys"),
    [
        (0, "fp32", set()),
        (0, "bf16", {"torch_autocast"}),
        (1, "bf16", {"bf16", "data_types"}),
        (3, "bf16", {"bf16", "data_types"}),
        (2, "fp16", {"fp16", "data_types"}),
    ],
)
def test_precision_by_stage(tmp_path: Path, zero: int, precision: str, keys: set[str]) -> None:
    config = small_config(tmp_path, {**stage(zero), "engine.precision": precision})
    content = deepspeed_config(config, data_ranks=1)
    assert content.keys() & {"torch_autocast", "bf16", "fp16", "data_types"} == keys


def test_the_shipped_stages_are_what_they_are_called() -> None:
    folder = Path(__file__).parents[2] / "configs/deepspeed"
    for number in range(4):
        assert json.loads((folder / f"zero{number}.json").read_text())["zero_optimization"]["stage"] == number
