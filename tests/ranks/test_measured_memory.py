"""The estimate of memory, against the peak that two ranks reach on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from on_ranks import on_ranks
from small_engine import CPU
from small_run import small_config

from megahead.config import RunConfig, deepspeed_config
from megahead.data import IndexedDataset, IndexedDatasetWriter, StreamSamples
from megahead.distributed import Group, Mesh
from megahead.engine import Engine
from megahead.estimate import rank_memory
from megahead.objectives import build_objective
from megahead.optim import build_adamw
from megahead.parallel import assemble
from megahead.pretraining import Feed, first_weights
from megahead.train.faults import Guard
from megahead.train.step import train_step


def status(key: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (peak since it was reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak(world: Group, config: RunConfig) -> int:
    """Bytes beyond those of the process before there was a model, over two steps."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left on the heap would hide what is taken here
    mesh, before = Mesh.build(world, config.parallel.tensor), status("VmRSS")
    module = assemble(config, mesh.tensor, CPU)
    optimizer, content = build_adamw(module, config.optimizer), deepspeed_config(config, mesh.data.size)
    weights = first_weights(config)
    engine = Engine(module, optimizer=optimizer, config=content, mesh=mesh, device=CPU, weights=weights)
    samples = StreamSamples(IndexedDataset(config.data.train), config.data.sequence_length, config.seed)
    objective = build_objective(config.objective, config.model.vocab_size)
    feed = Feed(samples, objective, config.data, config.batch, mesh.data)
    for step in range(3):
        if step == 1:
            Path("/proc/self/clear_refs").write_text("5")
        batches = feed.step(step * config.batch.global_size)
        train_step(engine, batches, 1e-3, CPU, mesh.world, Guard(config.faults), [])
    return status("VmHWM") - before


@pytest.mark.parametrize(("zero", "tensor"), [(0, 1), (0, 2), (3, 1)])
def test_the_estimate_is_near_the_measured_peak(tmp_path: Path, zero: int, tensor: int) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs a kernel that tells and resets a process's peak memory")
    ids = np.random.default_rng(0).integers(1, 8192, (60, 100))
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=8192) as writer:
        for document in ids.tolist():
            writer.add_document([*document, 0])
    changes = {
        "model": {"num_layers": 6, "hidden_size": 768, "num_heads": 12, "vocab_size": 8192},
        "data.sequence_length": 32,
        "batch": {"global_size": 4, "micro_size": 2},
        "engine.deepspeed": {"zero_optimization": {"stage": zero}},
        "parallel.tensor": tensor,
    }
    config = small_config(tmp_path, changes)
    assert 0.9 < max(on_ranks(2, peak, config)) / rank_memory(config, 2).total < 1.5
