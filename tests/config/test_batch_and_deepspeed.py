"""The batch triad, and how it is written into DeepSpeed's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megahead.config import BatchConfig, deepspeed_config
from support.small_run import small_config, stage


@pytest.mark.parametrize(("ranks", "steps"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_accumulation_fills_the_global_batch(ranks: int, steps: int) -> None:
    assert BatchConfig(global_size=48, micro_size=4).accumulation_steps(ranks) == steps


def test_the_triad_and_clipping_are_written_for_deepspeed(tmp_path: Path) -> None:
    content = deepspeed_config(small_config(tmp_path, stage(1)), data_ranks=2)
    assert content["train_batch_size"] == 8
    assert content["train_micro_batch_size_per_gpu"] == 2
    assert content["gradient_accumulation_steps"] == 2
    assert content["gradient_clipping"] == 1.0
    assert content["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("zero", "precision", "enabled"),
    [
        (0, "fp32", set()),
        (3, "fp32", set()),
        (0, "bf16", {"torch_autocast"}),
        (1, "bf16", {"bf16"}),
        (3, "bf16", {"bf16"}),
        (2, "fp16", {"fp16"}),
    ],
)
def test_precision_by_stage(tmp_path: Path, zero: int, precision: str, enabled: set[str]) -> None:
    config = small_config(tmp_path, {**stage(zero), "engine.precision": precision})
    content = deepspeed_config(config, data_ranks=1)
    formats = ("torch_autocast", "bf16", "fp16")
    assert {name for name in formats if content[name]["enabled"]} == enabled
    assert content["data_types"] == {"grad_accum_dtype": "fp32"}


def test_sections_of_number_formats_are_merged_key_by_key(tmp_path: Path) -> None:
    search = {"initial_scale_power": 12, "loss_scale_window": 100, "hysteresis": 4, "min_loss_scale": 2}
    given = {"zero_optimization": {"stage": 2}, "fp16": search, "bf16": {"enabled": False}}
    config = small_config(tmp_path, {"engine.deepspeed": given, "engine.precision": "fp16"})
    content = deepspeed_config(config, data_ranks=1)
    assert content["fp16"].items() >= {"enabled": True, **search}.items()
    assert "enabled" not in search  # what was given stays as it was
    safe = {"lower_precision_safe_modules": ["torch.nn.Linear"]}
    config = small_config(tmp_path, {"engine.deepspeed": {"torch_autocast": safe}, "engine.precision": "bf16"})
    assert deepspeed_config(config, data_ranks=1)["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", **safe}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_how_gradients_are_sent_depends_on_the_device(tmp_path: Path, zero: int) -> None:
    here, there = (
        deepspeed_config(small_config(tmp_path, stage(zero)), 2, device)["zero_optimization"]
        for device in ("cpu", "cuda")
    )
    assert here["reduce_bucket_size"] == 500_000
    assert 50_000_000 <= there["reduce_bucket_size"] <= 200_000_000
    assert there.get("overlap_comm", False) == (zero in (1, 2))
    assert there.get("contiguous_gradients", True) >= there.get("overlap_comm", False)  # else each bucket waits
    assert here.get("contiguous_gradients", True) == (zero not in (1, 2))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_file_says_is_kept_on_any_device(tmp_path: Path, device: str) -> None:
    zero = {"stage": 2, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": 7}
    given = {"zero_optimization": zero, "communication_data_type": "fp16"}
    content = deepspeed_config(small_config(tmp_path, {"engine.deepspeed": given}), 1, device)
    assert content["zero_optimization"].items() >= zero.items()
    assert content["communication_data_type"] == "fp16"
    bf16 = {
        "engine.precision": "bf16",
        "engine.deepspeed": stage(1)["engine.deepspeed"] | {"bf16": {"immediate_grad_update": False}},
    }
    assert deepspeed_config(small_config(tmp_path, bf16), 1, device)["bf16"]["immediate_grad_update"] is False


def test_sums_of_one_data_rank_are_not_rounded(tmp_path: Path) -> None:
    config = small_config(tmp_path, stage(1) | {"engine.precision": "bf16"})
    assert deepspeed_config(config, data_ranks=1)["communication_data_type"] == "fp32"
    assert "communication_data_type" not in deepspeed_config(config, data_ranks=2)


def test_the_shipped_stages_are_what_they_are_called() -> None:
    folder = Path(__file__).parents[2] / "configs/deepspeed"
    for number in range(4):
        assert json.loads((folder / f"zero{number}.json").read_text())["zero_optimization"]["stage"] == number
