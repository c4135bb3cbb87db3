"""One optimizer step: micro-batches through the engine, then all ranks decide together whether to apply it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megahead.engine import Engine
from megahead.objectives import DetectionResult, PhraseResult
from megahead.pretraining import StepBatches
from megahead.train.faults import Fault, Guard, found_afterwards
from megahead.train.tally import Tally


@dataclass(frozen=True)
class StepReport:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the targets of the global batch, in nats."""

    grad_norm: float
    """Global gradient norm before clipping."""

    applied: bool
    """False when the step was skipped: the weights are as before."""

    fault: Fault | None
    """What was wrong with it, if anything."""

    loss_scale: float
    """fp16's loss scale in this step; 1 for other formats."""

    learning_rate: float
    targets: int
    candidates: float

    rows_fetched: int | None
    """Rows of the embedding that this rank looked up; None unless `engine.embedding` is `rows`."""

    rows_stale: int
    """How many of the rows that this rank owns and any rank looked up were stale: not updated by the step before."""

    forward_seconds: list[float]
    """How long each rank's forward passes took."""

    cpu_seconds: float
    """Of this rank's process, all threads, its feed's too; not what else keeps the machine busy."""

    detection: DetectionResult | None
    """How well replaced tokens were told from others, in runs that replace some; their loss has a part in `loss`."""

    phrases: PhraseResult | None
    """How well masked phrases were found, in runs that look for them; so has theirs."""


def train_step(
    engine: Engine,
    batches: StepBatches,
    learning_rate: float,
    device: torch.device,
    tally: Tally,
    guard: Guard,
    recent_losses: list[float],
) -> StepReport:
    """Forward and backward of every micro-batch, then one update, unless the guard or the engine skips it.
    Collective."""
    cpu_seconds = time.process_time()
    stale = engine.begin(batches.rows)
    losses = [engine.micro_step(micro.to(device)) for micro in batches.micro_batches]
    # each is its sum times data_ranks * accumulation / targets; the mean over both is the mean over targets
    measured = tally.gather(losses, engine.forward_time)
    loss_scale = engine.loss_scale.value
    fault = guard.suspects(measured.losses_WA, recent_losses)
    skip = guard.must_skip(fault)
    result = engine.skip_step() if skip else engine.step(learning_rate)
    return StepReport(
        loss=float(measured.losses_WA.mean()),
        grad_norm=result.grad_norm,
        applied=result.applied,
        fault=fault if skip else found_afterwards(result, engine.loss_scale.is_dynamic) or fault,
        loss_scale=loss_scale,
        learning_rate=learning_rate,
        targets=batches.targets,
        candidates=batches.candidates,
        rows_fetched=None if batches.rows is None else len(batches.rows.ids_U),
        rows_stale=stale,
        forward_seconds=measured.forward_seconds,
        cpu_seconds=time.process_time() - cpu_seconds,
        detection=measured.detection,
        phrases=measured.phrases,
    )


def seed_step(seed: int, first_sample: int, data_rank: int, device: torch.device) -> None:
    """Seeds dropout on `device` from the step's first sample, so that a resumed run draws what others do.

    `torch.manual_seed` would write down the stack for each kind of device that this process does not use: some 4 ms.
    """
    step_seed = ((seed * 1_000_003 + first_sample) * 65_537 + data_rank) % 2**63
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)
