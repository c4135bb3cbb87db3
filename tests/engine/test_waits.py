"""How often a step makes the host wait for the device: counted on a CPU, where nothing has to be waited for."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megahead.config.plan import deepspeed_config
from megahead.distributed.group import Group
from megahead.engine.engine import Engine
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_engine import small_batches, small_engine
from support.small_run import small_config, write_text

MICRO_BATCHES = 4
WARM_UP = 3
"""Steps; DeepSpeed's throughput timer begins to wait in the third."""

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
"""Operators whose result the host needs before it goes on."""


ON_HOST = "attend_per_document"
"""The attention of processors."""


class HostReads(TorchDispatchMode):
    """Counts them, but for those of what lies on the host beside a device too: AdamW's counters of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            frames = traceback.extract_stack()
            self.count += not any("torch/optim" in frame.filename or frame.name == ON_HOST for frame in frames)
        return func(*args, **(kwargs or {}))


def step_counted(group: Group, stage: int, precision: str) -> tuple[int, int, int]:
    """Of one step: waits for the whole device, the host's reads in micro-batches, and those in the update."""
    engine = small_engine(group, stage, precision, accumulation=MICRO_BATCHES)
    waits: list[int] = []

    def micro_steps(step: int) -> None:
        for batch in small_batches([8, 1, 5, 2], MICRO_BATCHES / 16, seed=step):
            engine.micro_step(batch)

    for step in range(WARM_UP):
        micro_steps(step)
        engine.step(0.01)
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).synchronize = lambda *_: waits.append(1)  # the rank's process ends with this
    in_micro_batches, in_update = HostReads(), HostReads()
    with in_micro_batches:
        micro_steps(WARM_UP)
    with in_update:
        engine.step(0.01)
    return len(waits), in_micro_batches.count, in_update.count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_runs_ahead_through_all_micro_batches(stage: int, precision: str) -> None:
    """The update needs the norm of all gradients. DeepSpeed reads it at stages 1 to 3, checks what it clips by and for
    overflow, and once the norm is there, what is read after it was computed long before."""
    ((device, micro_batches, update),) = on_ranks(1, step_counted, stage, precision)
    assert (device, micro_batches) == (0, 0)
    assert 1 <= update <= (1 if stage == 0 else 5)


def timers(changes: dict[str, Any], tmp_path: Path) -> Any:
    config = small_config(tmp_path, changes)
    return deepspeed_config(config, 1).get("timers")


def test_an_explicit_timer_stays(tmp_path: Path) -> None:
    asked = {"throughput": {"enabled": True, "synchronized": False}}
    assert timers({}, tmp_path) == {"throughput": {"enabled": False}}
    assert timers({"engine.deepspeed": {"timers": asked}}, tmp_path) == asked


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective.name": "vanilla"},
        {"objective.bias": "once"},
        {"model.family": "llama", "engine.embedding": "rows"},
        {"data.isolate_documents": False, "objective.name": "headless"},
    ],
    ids=str,
)
def test_a_micro_batch_of_each_objective_reads_nothing(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path)
    micro_step, reads = Engine.micro_step, []

    def counting(engine: Engine, batch: Any) -> Tensor:
        with HostReads() as counted:
            loss = micro_step(engine, batch)
        reads.append(counted.count)
        return loss

    monkeypatch.setattr(Engine, "micro_step", counting)
    pretrain(small_config(tmp_path, changes | {"training.steps": 2}))
    assert reads == [0] * 8
