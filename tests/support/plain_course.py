"""A run of four steps on any mesh, and the plain torch process that it must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.samples import ConcatenatedSamples
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.losses.contrastive import build_objective
from megahead.objectives.auxiliary import auxiliary_class, training_row_collator
from megahead.objectives.loader import StepLoader
from megahead.optim import build_optimizer, learning_rate_ratio, set_learning_rate
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.initialized import initialized
from support.on_ranks import on_ranks
from support.small_run import shipped, small_config

STEPS = 4
OBJECTIVES = {
    "headless": {"name": "headless"},
    "vanilla": {"name": "vanilla"},
    "tied": {"name": "vanilla", "tied": True},
}
ROWS = {"engine.embedding": "rows"}


class Course(NamedTuple):
    """What four steps were like, and where they led."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def config_of(folder: Path, objective: str, **changes: Any) -> RunConfig:
    """Adam's eps is large beside rounding: where a gradient is zero but for it, steps must not be its sign."""
    fixed = {
        "objective": dict(OBJECTIVES[objective]),
        "optimizer.eps": 1e-4,
        "optimizer.gradient_clipping": 0.5,
        "training.steps": STEPS,
        "training.checkpoint_every": STEPS,
        "training.evaluate_every": STEPS,
    }
    return small_config(folder, fixed | changes)


def plain_torch(config: RunConfig) -> Course:
    """No DeepSpeed, no ranks: micro-batches, clipping, AdamW."""
    module = initialized(config)
    optimizer = build_optimizer(module, config.optimizer)
    text = IndexedDataset(config.data.train)
    samples, collator = (
        ConcatenatedSamples(text, config.sample_length(), config.seed),
        training_row_collator(config, [text]),
    )
    auxiliary = auxiliary_class(config.objective.auxiliary_or_empty())
    objective = build_objective(config.objective, config.model.vocab_size, torch.ones(config.model.vocab_size))
    group = resolve_candidate_group_samples(config.objective, config.batch, 1)
    reading = samples, objective, config.data, config.batch, Group()
    loader = StepLoader(*reading, group_samples=group, seed=config.seed, collator=collator, auxiliary=auxiliary)
    losses, norms = [], []
    for step in range(STEPS):
        micro_batches = loader.step(step * config.batch.global_size).micro_batches
        optimizer.zero_grad()
        loss = torch.stack([module(micro) for micro in micro_batches]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.gradient_clipping)))
        ratio = learning_rate_ratio(config.schedule, step, STEPS)
        set_learning_rate(optimizer.param_groups, config.optimizer.learning_rate * ratio)
        optimizer.step()
        losses.append(loss.item())
    return Course(losses, norms, {f"weight/{name}": p.detach() for name, p in module.named_parameters()})


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def on_mesh(folder: Path, objective: str, stage: int, tensor: int, data: int, **changes: Any) -> Course:
    """The same under DeepSpeed with the settings we have for `stage`, at the size of a small model.

    Some gradients are bundled and some sent by themselves; at stage 3 even the smallest parameter is cut up.
    """
    small = {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}
    zero = shipped(f"zero{stage}")["zero_optimization"] | small
    meshed = {"parallel.tensor": tensor, "engine.deepspeed": {"zero_optimization": zero}}
    on_ranks(tensor * data, run, config_of(folder, objective, **(meshed | changes)))
    records, checkpoint = read_metrics(folder / "run").training, open_checkpoint(folder / "run")
    weights = {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith("weight/")}
    return Course([r["loss"] for r in records], [r["gradient_norm"] for r in records], weights)


def as_on_gpus(folder: Path, stage: int, precision: str, data: int = 2) -> dict[str, Any]:
    """The change to the settings that runs on GPUs have at `stage` on so many data ranks, but for buckets of a small
    model's size."""
    small = {"stage": stage, "reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}
    asked = {"engine.deepspeed": {"zero_optimization": small}, "engine.precision": precision}
    complete = deepspeed_config(config_of(folder, "headless", **asked), data_ranks=data, device="cuda")
    tuned = {
        name: complete[name] for name in ("zero_optimization", "bf16", "communication_data_type") if name in complete
    }
    return asked | {"engine.deepspeed": tuned}


def distance(course: Course, reference: Course, start: dict[str, Tensor]) -> float:
    """How far apart two courses end, as a share of the way that the second went from `start`."""
    way = sum(float((reference.weights[name] - weight).square().sum()) for name, weight in start.items())
    apart = sum(float((reference.weights[name] - course.weights[name]).square().sum()) for name in start)
    return float((apart / way) ** 0.5)


def initial(config: RunConfig) -> dict[str, Tensor]:
    """The weights a run of `config` starts from."""
    return {f"weight/{name}": p.detach() for name, p in initialized(config).named_parameters()}


def assert_equal(ours: Course, reference: Course) -> None:
    """So near that a beta2 of 0.951 instead of 0.95 shows in the losses."""
    assert ours.losses == pytest.approx(reference.losses, abs=3e-6)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-5)
    assert ours.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_near(ours: Course, reference: Course, config: RunConfig) -> None:
    """Losses within 0.2 %, norms within 1 %, weights within 2 % of the way they went (measured: 0.05, 0.15, 0.8 %)."""
    assert ours.losses == pytest.approx(reference.losses, rel=2e-3)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-2)
    assert distance(ours, reference, initial(config)) < 0.02
