"""Memory that runs out ends a run in one sentence that names what to change; other errors pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megahead.config.plan import RunPlan
from megahead.errors import UserError
from megahead.train.run import explain_out_of_memory
from support.small_run import small_config, stage


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        OverflowError("Python int too large to convert to C ssize_t"),
        OverflowError("cannot fit 'int' into an index-sized integer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_allocator_raises_names_what_to_change(tmp_path: Path, error: Exception) -> None:
    config = small_config(tmp_path, stage(1) | {"parallel.tensor": 2})
    with pytest.raises(UserError) as caught, explain_out_of_memory(RunPlan.of(config, 8)):
        raise error
    ways = (
        "; take a higher ZeRO stage in engine.deepspeed (now 1), or lower batch.micro_size (now 2), "
        "or set engine.activation_checkpointing, or set parallel.sequence, or raise parallel.tensor (now 2), "
        "or offload to the host with an *_offload.json."
    )
    assert str(caught.value).endswith(f"{str(error) or 'MemoryError'}){ways}")


def test_what_is_done_already_is_not_advised(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    done = {"batch.micro_size": 1, "engine.activation_checkpointing": True, "engine.deepspeed.zero_optimization": zero}
    with pytest.raises(UserError) as caught, explain_out_of_memory(RunPlan.of(small_config(tmp_path, done), 8)):
        raise MemoryError
    assert str(caught.value).endswith("; take more ranks, or raise parallel.tensor (now 1).")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("sizes do not match"), OverflowError("math range error"), OSError(2, "No such file")],
    ids=str,
)
def test_other_errors_pass(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_out_of_memory(RunPlan.of(small_config(tmp_path))):
        raise error
    assert caught.value is error
