"""The batch triad, and how it is written into DeepSpeed's JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megahead.config.data import BatchConfig
from megahead.config.plan import KNOWN_KEYS, REFUSED_KEYS, deepspeed_config, read_deepspeed
from megahead.distributed.group import Group
from megahead.errors import ConfigError, UserError
from support.on_ranks import on_ranks
from support.small_run import small_config, stage


@pytest.mark.parametrize(("ranks", "steps"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_accumulation_fills_the_global_batch(ranks: int, steps: int) -> None:
    assert BatchConfig(global_size=48, micro_size=4).accumulation_steps(ranks) == steps


@pytest.mark.parametrize(
    ("size", "micro", "ranks"), [(1024, 64, 7), (256, 2, 12), (256, 32, 512), (250, 8, 4), (1, 1, 8)]
)
def test_each_global_batch_that_an_error_names_can_be_shared(size: int, micro: int, ranks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchConfig(global_size=size, micro_size=micro).accumulation_steps(ranks)
    named = re.search(r"(?:try |batch\.global_size=)(\d+)(?: or (\d+))?\.$", str(caught.value))
    assert named is not None
    for other in filter(None, named.groups()):
        assert BatchConfig(global_size=int(other), micro_size=micro).accumulation_steps(ranks) >= 1


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


class Asked(dict[str, Any]):
    """Settings that note under which keys somebody looks for some."""

    def __init__(self, content: dict[str, Any], *parents: str) -> None:
        self.parents, self.paths = parents, set[tuple[str, ...]]()
        super().__init__(content)

    def __contains__(self, key: object) -> bool:
        self.paths.add((*self.parents, str(key)))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.paths.add((*self.parents, key))
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # for `key in settings.keys()`

    def __copy__(self) -> Asked:
        return self


def keys_of(model: type[BaseModel], *parents: str) -> set[tuple[str, ...]]:
    """All that pydantic reads, by name or alias."""
    found = set[tuple[str, ...]]()
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        for key in {name, field.alias or name}:
            found |= {(*parents, key)}
            for kind in kinds:
                found |= keys_of(kind, *parents, key) if issubclass(kind, BaseModel) else set()
    return found


def keys_that_deepspeed_reads(_group: Group) -> set[tuple[str, ...]]:
    import deepspeed
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    plain = {name: Asked({}, name) for name in ("aio", "torch_autocast")}
    whole = Asked({"train_batch_size": 1, **plain})
    deepspeed.init_distributed("gloo")  # then it reads of ranks, too
    config.DeepSpeedConfig(whole)
    sections: dict[tuple[str, ...], type[BaseModel]] = {
        ("zero_optimization",): DeepSpeedZeroConfig,
        ("bf16",): precision_config.DeepSpeedBF16Config,
        ("fp16",): precision_config.DeepSpeedFP16Config,
        ("comms_logger",): CommsLoggerConfig,
        ("timers", "throughput"): DeepSpeedThroughputTimerConfig,
    }
    found = [keys_of(model, *place) for place, model in sections.items()]
    removed = {("zero_optimization", key) for key in config._REMOVED_ZERO_CONFIG_KEYS}
    return whole.paths.union(removed, *found, *(section.paths for section in plain.values()))


def known_keys(keys: Mapping[str, Any], *parents: str) -> set[tuple[str, ...]]:
    below = [known_keys(section, *parents, key) for key, section in keys.items() if section is not None]
    return {(*parents, key) for key in keys}.union(*below)


def test_each_key_that_the_installed_deepspeed_reads_is_used_or_refused_by_name() -> None:
    (theirs,) = on_ranks(1, keys_that_deepspeed_reads)
    refused = {tuple(path.split(".")) for path in REFUSED_KEYS}
    below_refused = {path for path in theirs if any(path[:n] in refused for n in range(1, len(path)))}
    not_read_by_its_config = {("timers", "throughput"), ("data_types", "grad_accum_dtype"), ("moe",)}
    assert theirs - below_refused - known_keys(KNOWN_KEYS) - refused == set()
    assert (known_keys(KNOWN_KEYS) | refused) - theirs == not_read_by_its_config


def test_what_is_switched_off_passes_but_no_unknown_key(tmp_path: Path) -> None:
    off: dict[str, Any] = {
        "amp": {"enabled": False},
        "sparse_gradients": False,
        "fp16": {"enabled": False, "fp16_opt_level": "O1"},
    }
    off["zero_optimization"] = {"stage": 1, "cpu_offload": False}
    deepspeed_config(small_config(tmp_path, {"engine.deepspeed": off}), data_ranks=1)
    with pytest.raises(UserError, match=r"`engine\.deepspeed\.zero_optimisation` is not a setting; did you mean"):
        deepspeed_config(small_config(tmp_path, {"engine.deepspeed": {"zero_optimisation": False}}), data_ranks=1)


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.json").write_text('{"zero_optimization": {"stage": 2, "stage": 0}}')
    with pytest.raises(UserError, match=r"twice.json is not JSON \(stage is given twice\)"):
        read_deepspeed(str(tmp_path / "twice.json"))


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "marked.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8-sig")
    assert read_deepspeed(str(tmp_path / "marked.json")) == {"zero_optimization": {"stage": 2}}


def test_the_shipped_stages_are_what_they_are_called() -> None:
    folder = Path(__file__).parents[2] / "configs/deepspeed"
    for number in range(4):
        assert json.loads((folder / f"zero{number}.json").read_text())["zero_optimization"]["stage"] == number
