"""Memory of ranks on a CPU: the estimate against measured peaks, and a run that only ZeRO 3 fits under a limit."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megahead.config.plan import RunPlan, deepspeed_config
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.samples import ConcatenatedSamples
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch
from megahead.engine.engine import Engine
from megahead.estimate import rank_memory
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.fused_softmax import fused_softmax_loss
from megahead.losses.scores import Dot
from megahead.objectives.loader import StepLoader
from megahead.objectives.pretraining import build_parallel_model, initial_weights
from megahead.optim import build_optimizer
from megahead.train.faults import FaultPolicy
from megahead.train.run import explain_out_of_memory, pretrain
from megahead.train.step import StepMetrics, train_step
from support.long import long, long_but
from support.on_ranks import on_ranks
from support.peaks import freed_memory_goes_back, measures_peaks, peak_above, told
from support.small_engine import CPU
from support.small_run import shipped, small_config

VOCABULARY = 4096
TINY = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "vocab_size": VOCABULARY}
LARGE = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": VOCABULARY}
"""21 M parameters."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (60, 100))
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=VOCABULARY) as writer:
        for document in ids.tolist():
            writer.add_document([*document, 0])
    return tmp_path


def config_of(folder: Path, stage: int, changes: dict[str, Any], **zero: int) -> RunConfig:
    """A large model and small batches, with the settings we ship for `stage`."""
    fixed = {
        "model": LARGE,
        "data.sequence_length": 8,
        "batch": {"global_size": 4, "micro_size": 1},
        "engine.deepspeed": {"zero_optimization": shipped(f"zero{stage}")["zero_optimization"] | zero},
    }
    return small_config(folder, fixed | changes)


def trained(world: Group, config: RunConfig, steps: int) -> Engine:
    mesh = Mesh.build(world, config.parallel.tensor)
    module = build_parallel_model(config, mesh.tensor_group, CPU)
    optimizer, content = build_optimizer(module, config.optimizer), deepspeed_config(config, mesh.data_group.size)
    weights = initial_weights(config)
    engine = Engine(module, optimizer=optimizer, config=content, mesh=mesh, device=CPU, weights=weights)
    samples = ConcatenatedSamples(IndexedDataset(config.data.train), config.data.sequence_length, config.seed)
    objective = build_objective(config.objective, config.model.vocab_size)
    loader = StepLoader(samples, objective, config.data, config.batch, mesh.data_group)
    step_metrics, fault_policy = StepMetrics(mesh.world_group, mesh.tensor_group.size), FaultPolicy(config.faults)
    for step in range(steps):
        batches = loader.step(step * config.batch.global_size)
        train_step(engine, batches, 1e-3, CPU, step_metrics, fault_policy, [])
    return engine


def peak(world: Group, config: RunConfig) -> int:
    """Bytes that the model takes over two steps, once a tiny one has brought in all code and connections."""
    freed_memory_goes_back()
    trained(world, config.model_copy(update={"model": config.model.model_copy(update=TINY)}), 1)
    return peak_above(lambda: trained(world, config, 2))[0]


@measures_peaks
@pytest.mark.parametrize(
    ("stage", "precision", "tensor"),
    long_but([(1, "bf16", 1)], [(s, "bf16", 1) for s in range(4)] + [(3, "fp32", 1), (0, "fp32", 2)]),
)
def test_the_estimate_is_near_the_measured_peak(text: Path, stage: int, precision: str, tensor: int) -> None:
    """Measured: 1.00 to 1.05 times the estimate."""
    config = config_of(text, stage, {"engine.precision": precision, "parallel.tensor": tensor})
    assert 0.95 < max(on_ranks(2, peak, config)) / rank_memory(RunPlan.of(config, 2)).total < 1.25


def peak_of_loss(world: Group, targets: int, rows: int, hidden: int) -> int:
    def work(targets: int = targets) -> None:
        outputs, table = torch.ones(targets, hidden).requires_grad_(), torch.ones(rows, hidden).requires_grad_()
        candidates = Candidates(None, None, torch.zeros(targets, dtype=torch.int64))
        fused_softmax_loss(outputs, table, candidates, Dot(), world).backward()

    work(16)
    return peak_above(work)[0]


@measures_peaks
def test_the_estimate_of_the_loss_is_near_its_measured_peak(tmp_path: Path) -> None:
    """Measured: 1.02 times the estimate; 1.27 of one without the copies of both gradients."""
    model = {**TINY, "hidden_size": 1024, "vocab_size": 1024}
    objective, batch = {"name": "vanilla", "tied": True}, {"global_size": 32, "micro_size": 32}
    changes = {"model": model, "objective": objective, "batch": batch, "data.sequence_length": 128}
    config = small_config(tmp_path, changes | {"engine.precision": "fp32"})
    (peak,) = on_ranks(1, peak_of_loss, 32 * 128, 1024, 1024)
    assert 0.95 < peak / rank_memory(RunPlan.of(config, 1)).loss < 1.15


@measures_peaks
@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_the_estimate_of_a_llama_is_near_its_measured_peak(text: Path, stage: int) -> None:
    """Measured: 1.03 and 1.06 times the estimate."""
    llama = {"family": "llama", "num_key_heads": 2, "intermediate_size": 1408}
    config = config_of(text, stage, {"model": {**LARGE, **llama}, "engine.precision": "bf16"})
    assert 0.95 < max(on_ranks(2, peak, config)) / rank_memory(RunPlan.of(config, 2)).total < 1.25


@measures_peaks
@pytest.mark.parametrize("stage", [0, long(3)])
def test_the_estimate_of_a_modernbert_is_near_its_measured_peak(text: Path, stage: int) -> None:
    model = {**LARGE, "family": "modernbert", "intermediate_size": 1024, "local_window": 16}
    masking = {"mask_token": 1, "cls_token": 2, "sep_token": 3}
    config = config_of(text, stage, {"model": model, "masking": masking})
    assert 0.95 < max(on_ranks(2, peak, config)) / rank_memory(RunPlan.of(config, 2)).total < 1.25


RANKS, LIMIT = 4, 260 * 2**20
SHARED_OUT = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**6}
SHARED_OUT["stage3_max_reuse_distance"] = 10**6


def limit() -> None:
    """This process to LIMIT bytes more than it has."""
    freed_memory_goes_back()
    most = told("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def run_limited(world: Group, config: RunConfig) -> str:
    limit()
    return pretrain(config, Launch()).ending


def step_limited(world: Group, config: RunConfig) -> int:
    limit()
    with explain_out_of_memory(RunPlan.of(config, world.size)):
        return trained(world, config, 1).optimizer_steps


@pytest.mark.long
def test_zero_3_trains_what_zero_0_has_no_room_for(text: Path) -> None:
    """At ZeRO 0 states alone are 320 MiB a rank; at ZeRO 3, 80 of states and about 90 of all else that a rank takes."""
    replicated, sharded = config_of(text, 0, {}), config_of(text, 3, {}, **SHARED_OUT)
    sentence = (
        r"UserError: memory must hold a rank's share of the run, at ZeRO 0 about 0\.\d+ GiB, but does not \(.*\); "
        r"take a higher ZeRO stage in engine.deepspeed \(now 0\), or "
    )
    with pytest.raises(AssertionError, match=sentence):
        on_ranks(RANKS, run_limited, replicated)
    assert on_ranks(RANKS, step_limited, sharded) == [1] * RANKS
