"""One optimizer step: micro-batches through the engine, then what all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megahead.distributed import Group
from megahead.engine import Engine
from megahead.pretraining import StepBatches


@dataclass(frozen=True)
class StepReport:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the targets of the global batch, in nats."""

    grad_norm: float
    """Global gradient norm before clipping."""

    applied: bool
    """False when gradients were not finite: weights are as before."""

    learning_rate: float
    targets: int
    candidates: float


def train_step(
    engine: Engine, batches: StepBatches, learning_rate: float, device: torch.device, data: Group
) -> StepReport:
    """Forward and backward of every micro-batch, one update, and the global loss. Collective.

    `data`: the data ranks, on a connection for CPU tensors.
    """
    losses = [engine.micro_step(micro.to(device)) for micro in batches.micro_batches]
    result = engine.step(learning_rate)
    # each is its sum times data_ranks * accumulation / targets; the mean over both is the mean over targets
    local = torch.stack(losses).double().mean().cpu() / data.size
    return StepReport(
        loss=float(data.sum_(local)),
        grad_norm=result.grad_norm,
        applied=result.applied,
        learning_rate=learning_rate,
        targets=batches.targets,
        candidates=batches.candidates,
    )


def seed_step(seed: int, first_sample: int, data_rank: int) -> None:
    """Seeds dropout from where the step stands in the data, so that a resumed run draws as an undisturbed one."""
    torch.manual_seed(((seed * 1_000_003 + first_sample) * 65_537 + data_rank) % 2**63)
