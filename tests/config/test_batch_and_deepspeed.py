"""The batch triad, and how it is written into DeepSpeed's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import small_config, stage

from megahead.config import BatchConfig, deepspeed_config
from megahead.errors import ConfigError, UserError


@pytest.mark.parametrize(("ranks", "steps"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_accumulation_fills_the_global_batch(ranks: int, steps: int) -> None:
    assert BatchConfig(global_size=48, micro_size=4).accumulation_steps(ranks) == steps


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "sentence"),
    [
        (
            250,
            8,
            4,
            "`batch.global_size` must be a multiple of micro_size x data ranks (8 x 4), but is 250 instead; "
            "try 224 or 256.",
        ),
        (
            4,
            8,
            2,
            "`batch.global_size` must be a multiple of micro_size x data ranks (8 x 2), but is 4 instead; try 16.",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut(size: int, micro: int, ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchConfig(global_size=size, micro_size=micro).accumulation_steps(ranks)
    assert str(caught.value) == sentence


def test_the_triad_and_clipping_are_written_for_deepspeed(tmp_path: Path) -> None:
    content = deepspeed_config(small_config(tmp_path, stage(1)), data_ranks=2)
    assert content["train_batch_size"] == 8
    assert content["train_micro_batch_size_per_gpu"] == 2
    assert content["gradient_accumulation_steps"] == 2
    assert content["gradient_clipping"] == 1.0
    assert content["zero_optimization"] == {"stage": 1}


def test_what_the_file_says_otherwise_is_a_conflict(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"engine.deepspeed": {"gradient_clipping": 0.5}})
    with pytest.raises(ConfigError, match=r"be left out or agree with the run \(1.0\), but is 0.5"):
        deepspeed_config(config, data_ranks=1)


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


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"deepspeed": "nowhere.json"}, "`engine.deepspeed` must name a DeepSpeed JSON file, but is nowhere.json"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "stage` must be 0, 1, 2 or 3, but is 4 instead."),
        ({"deepspeed": {}, "precision": "fp16"}, "`engine.precision` must be fp32 or bf16 at ZeRO stage 0"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}, "activation_checkpointing": "selective"},
            "`engine.activation_checkpointing` must be true or false at ZeRO stage 3",
        ),
    ],
)
def test_engines_that_cannot_run(tmp_path: Path, engine: dict[str, Any], sentence: str) -> None:
    changes = {f"engine.{name}": value for name, value in engine.items()}
    with pytest.raises(UserError) as caught:
        deepspeed_config(small_config(tmp_path, changes), data_ranks=1)
    assert sentence in str(caught.value)


def test_the_shipped_stages_are_what_they_are_called() -> None:
    folder = Path(__file__).parents[2] / "configs/deepspeed"
    for number in range(4):
        assert json.loads((folder / f"zero{number}.json").read_text())["zero_optimization"]["stage"] == number
