"""What a config comes to on so many ranks is resolved once, and stays what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megahead.config import plan as resolving
from megahead.config.plan import RunPlan, deepspeed_config
from megahead.errors import ConfigError, UserError
from megahead.estimate import memory_reductions, rank_memory
from megahead.train.preflight import describe_run
from megahead.train.run import explain_out_of_memory, pretrain
from support.forked import forked
from support.small_run import small_config, write_text


def named(folder: Path, content: Any) -> dict[str, Any]:
    """The change that names a DeepSpeed file in `folder`."""
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(content))
    return {"engine.deepspeed": str(path)}


def test_a_plan_holds_what_config_and_ranks_decide_together(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config = small_config(tmp_path, {"engine.deepspeed": zero, "parallel.tensor": 2})
    plan = RunPlan.of(config, 4)
    assert (plan.ranks, plan.data_ranks, plan.accumulation_steps, plan.zero_stage) == (4, 2, 2, 2)
    assert plan.deepspeed == deepspeed_config(config, 2)
    assert plan.zero["offload_optimizer"] == {"device": "cpu"}
    assert (plan.group_samples(), plan.group_samples(saved=8)) == (2, 8)


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        *(
            (1, dict.fromkeys(("offload_optimizer", "offload_param"), section))
            for section in (None, {}, {"device": "none"})
        ),
        (1, {"offload_optimizer": {"device": None, "pin_memory": True}}),
        (0, {"offload_optimizer": CPU, "offload_param": CPU}),
        (1, {"offload_param": CPU}),
        (2, {"offload_param": CPU}),
    ],
    ids=str,
)
def test_an_offload_that_deepspeed_ignores_is_none(tmp_path: Path, stage: int, sections: dict[str, Any]) -> None:
    """The estimate counted the optimizer's state or the weights as the host's."""
    stages = [{"stage": stage}, {"stage": stage, **sections}]
    configs = [small_config(tmp_path, {"engine.deepspeed": {"zero_optimization": zero}}) for zero in stages]
    without, unused = (RunPlan.of(config, 2) for config in configs)
    assert without.deepspeed == unused.deepspeed
    assert rank_memory(without) == rank_memory(unused)


def test_a_plan_that_is_not_told_its_device_takes_the_configs(tmp_path: Path) -> None:
    on_cpu, anywhere = (small_config(tmp_path, {"engine.device": device}) for device in ("cpu", "auto"))
    assert RunPlan.of(on_cpu).zero == RunPlan.of(anywhere, device="cpu").zero
    assert RunPlan.of(anywhere).zero == RunPlan.of(anywhere, device="cuda").zero != RunPlan.of(on_cpu).zero


def test_a_config_that_cannot_be_cut_over_the_ranks_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`parallel.tensor` must divide the number of ranks \(3\)"):
        RunPlan.of(small_config(tmp_path, {"parallel.tensor": 2}), 3)
    with pytest.raises(ConfigError, match=r"`batch.global_size` must be a multiple"):
        RunPlan.of(small_config(tmp_path), 3)


def test_the_file_of_deepspeeds_settings_may_go_once_the_plan_is_made(tmp_path: Path) -> None:
    config = small_config(tmp_path, named(tmp_path, {"zero_optimization": {"stage": 1}}))
    plan = RunPlan.of(config, 2)
    (tmp_path / "deepspeed.json").unlink()
    assert dict(describe_run(plan))["engine"] == "ZeRO 1, fp32"
    assert rank_memory(plan).total > 0
    assert memory_reductions(plan)[0].endswith("(now 1)")
    with pytest.raises(UserError, match="at ZeRO 1 about"), explain_out_of_memory(plan):
        raise MemoryError


def test_a_run_reads_the_file_of_deepspeeds_settings_once(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert forked(times_read, tmp_path, named(tmp_path, {"zero_optimization": {"stage": 1}})) == 1


def times_read(folder: Path, changes: dict[str, Any]) -> int:
    read, original = [], resolving.read_deepspeed

    def noted(name: str) -> dict[str, Any]:
        read.append(name)
        return original(name)

    resolving.read_deepspeed = noted  # type: ignore[assignment]
    pretrain(small_config(folder, changes))
    return len(read)
