"""One optimizer step: micro-batches through the engine, their metrics summed over ranks, its time and utilization."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.config.plan import RunPlan
from megahead.distributed.group import Group
from megahead.engine.engine import Engine, ForwardTimer, StepResult
from megahead.estimate import peak_flops, run_flops
from megahead.objectives.loader import StepBatches
from megahead.train.faults import Fault, FaultPolicy, gradient_fault

# What the micro-batches of a step measured, told to all ranks in one message.
#
# W ranks, A accumulation steps.


@dataclass(frozen=True)
class Measured:
    """Of one step, the same on every rank."""

    losses_WA: Tensor
    """[W, A] on the CPU, in float64."""

    forward_seconds: list[float]
    """How long each rank's forward passes took."""

    auxiliary: dict[str, float]
    """What an auxiliary objective has summed over the global batch, by name."""


class StepMetrics:
    """Of one step at a time; a model notes here what it finds beside its loss."""

    def __init__(self, world_group: Group, tensor_ranks: int) -> None:
        """`world_group`: all ranks, for CPU tensors; each `tensor_ranks` consecutive ones have the same batches."""
        self._world_group, self._tensor_ranks = world_group, tensor_ranks
        self._noted: list[Tensor] = []
        self._names: list[str] = []

    def record(self, sums: Mapping[str, Tensor]) -> None:
        """What one batch adds, by the same names in each, still on its device: nothing waits for that."""
        self._names = list(sums)
        self._noted.append(torch.stack([value.detach().double() for value in sums.values()]))

    def gather(self, losses: Sequence[Tensor], forward_time: ForwardTimer) -> Measured:
        """That of all ranks, from this one's `losses`, one for each of its micro-batches, and from what was noted since
        the last call. Collective; waits for the device, once."""
        noted = [torch.stack(self._noted).sum(0)] if self._noted else []
        self._noted.clear()
        mine = torch.cat([torch.stack(list(losses)).double(), *noted]).cpu()
        gathered = self._world_group.all_gather(torch.cat([mine, mine.new_tensor([forward_time.pop_seconds()])]))
        losses_WA, noted_WS, forward_W1 = gathered.tensor_split((len(losses), -1), dim=1)
        sums = noted_WS[:: self._tensor_ranks].sum(0).tolist() if noted else []
        auxiliary = dict(zip(self._names, sums, strict=True)) if noted else {}
        return Measured(losses_WA, forward_W1.flatten().tolist(), auxiliary)


@dataclass(frozen=True)
class StepReport(StepResult):
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the targets of the global batch, in nats."""

    fault: Fault | None
    """What was wrong with it, if anything."""

    loss_scale: float
    """fp16's loss scale in this step; 1 for other formats."""

    learning_rate: float
    targets: int
    candidates: float

    counts: Mapping[str, float]
    """What the engine counted in it on this rank, by its name in the log."""

    forward_seconds: list[float]
    """How long each rank's forward passes took."""

    cpu_seconds: float
    """Of this rank's process, all threads, its loader's too; not what else keeps the machine busy."""

    auxiliary: dict[str, float]
    """What an auxiliary objective has summed over the global batch, by name; its loss has a part in `loss`."""


def train_step(
    engine: Engine,
    batches: StepBatches,
    learning_rate: float,
    device: torch.device,
    step_metrics: StepMetrics,
    fault_policy: FaultPolicy,
    recent_losses: list[float],
) -> StepReport:
    """Forward and backward of every micro-batch, then one update, unless the fault policy or the engine skips it.
    Collective."""
    cpu_seconds = time.process_time()
    counts = engine.prepare_step(batches.rows)
    losses = [engine.micro_step(micro.to(device)) for micro in batches.micro_batches]
    # each is its sum times data_ranks * accumulation / targets; the mean over both is the mean over targets
    measured = step_metrics.gather(losses, engine.forward_time)
    loss_scale = engine.loss_scale.value
    fault = fault_policy.find_loss_fault(measured.losses_WA, recent_losses)
    skip = fault_policy.must_skip(fault)
    result = engine.skip_step() if skip else engine.step(learning_rate)
    return StepReport(
        **vars(result),
        loss=float(measured.losses_WA.mean()),
        fault=fault if skip else gradient_fault(result, engine.loss_scale.is_dynamic) or fault,
        loss_scale=loss_scale,
        learning_rate=learning_rate,
        targets=batches.targets,
        candidates=batches.candidates,
        counts=counts,
        forward_seconds=measured.forward_seconds,
        cpu_seconds=time.process_time() - cpu_seconds,
        auxiliary=measured.auxiliary,
    )


def seed_step(seed: int, first_sample: int, data_rank: int, device: torch.device) -> None:
    """Seeds dropout on `device` from the step's first sample, so that a resumed run draws what others do.

    `torch.manual_seed` would write down the stack for each kind of device that this process does not use: some 4 ms.
    """
    step_seed = ((seed * 1_000_003 + first_sample) * 65_537 + data_rank) % 2**63
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)


class Stopwatch:
    """Measures how long training took, without pauses. Starts when it is created, at `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is not counted."""
        before = time.monotonic()
        yield
        self._start += time.monotonic() - before


# Model FLOPs utilization (MFU): which share of the devices' peak a speed is (Chowdhery et al. 2022, arXiv 2204.02311,
# appendix B).


@dataclass(frozen=True)
class Utilization:
    """For a run on `devices` devices with a peak of `device_peak` operations per second each (None: not known)."""

    fixed_flops: float
    """Operations per token whatever it is scored against."""

    row_flops: float
    """Operations per token for each row that its output is scored against."""

    vocabulary_rows: int
    devices: int
    device_peak: float | None

    @classmethod
    def on(cls, device: torch.device, plan: RunPlan) -> Utilization:
        """For a run whose ranks each have a device like this one; CPUs have no known peak."""
        fixed, with_a_row = (run_flops(plan.config, rows).total for rows in (0, 1))
        device_peak = peak_flops(device_name(device), plan.config.engine.precision)
        return cls(fixed, with_a_row - fixed, plan.config.model.padded_vocab_size(), plan.ranks, device_peak)

    def of(self, tokens_per_second: float, candidates: float) -> dict[str, float]:
        """`flops_per_second` of one device, and `mfu`, its share of the device's peak, if that is known.

        Counts the operations that the model needs (body, attention over whole rows, scores of the targets' candidates);
        what activation checkpointing computes again does not count. `candidates`: mean number that an output is scored
        against, 0 for the whole vocabulary.
        """
        flops = self.fixed_flops + self.row_flops * (round(candidates) or self.vocabulary_rows)
        speed = flops * tokens_per_second / self.devices
        return {"flops_per_second": speed} | ({"mfu": speed / self.device_peak} if self.device_peak else {})


def device_name(device: torch.device) -> str:
    """Its product name; cpu for all CPUs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
