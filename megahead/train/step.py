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
from megahead.estimate import run_flops
from megahead.objectives.loader import StepBatches
from megahead.train.faults import Fault, FaultPolicy, gradient_fault

# The metrics of a step's micro-batches, gathered from all ranks in one collective.
#
# Shapes: W ranks, A accumulation steps, S sums of an auxiliary objective.


@dataclass(frozen=True)
class GatheredMetrics:
    """The metrics of one step, the same on every rank."""

    losses_WA: Tensor
    """[W, A] on the CPU, in float64."""

    forward_seconds: list[float]
    """The duration of each rank's forward passes."""

    auxiliary_sums: dict[str, float]
    """Sums of an auxiliary objective's loss and metrics over the global batch, by name."""


class StepMetrics:
    """Gathers the losses of a step, and the sums of an auxiliary objective's loss and metrics, which the model records
    in its forward pass."""

    def __init__(self, world_group: Group, tensor_ranks: int) -> None:
        """`world_group`: all ranks, for CPU tensors; every `tensor_ranks` consecutive ones have the same batches."""
        self._world_group, self._tensor_ranks = world_group, tensor_ranks
        self._recorded: list[Tensor] = []
        self._names: list[str] = []

    def record(self, sums: Mapping[str, Tensor]) -> None:
        """Adds a micro-batch's sums, with the same names for each, without synchronizing with the device."""
        self._names = list(sums)
        self._recorded.append(torch.stack([value.detach().double() for value in sums.values()]))

    def gather(self, losses: Sequence[Tensor], forward_timer: ForwardTimer) -> GatheredMetrics:
        """Gathers the `losses` of this rank's micro-batches, and the sums recorded since the last call, from all ranks.
        Collective; synchronizes with the device once."""
        sums = [torch.stack(self._recorded).sum(0)] if self._recorded else []
        self._recorded.clear()
        metrics = torch.cat([torch.stack(list(losses)).double(), *sums]).cpu()
        metrics = torch.cat([metrics, metrics.new_tensor([forward_timer.pop_seconds()])])
        losses_WA, sums_WS, forward_W1 = self._world_group.all_gather(metrics).tensor_split((len(losses), -1), dim=1)
        totals = sums_WS[:: self._tensor_ranks].sum(0).tolist() if sums else []
        auxiliary_sums = dict(zip(self._names, totals, strict=True)) if sums else {}
        return GatheredMetrics(losses_WA, forward_W1.flatten().tolist(), auxiliary_sums)


@dataclass(frozen=True)
class StepReport(StepResult):
    """The result and metrics of one step; the same on every rank, except `engine_metrics` and `cpu_seconds`."""

    loss: float
    """Mean over the targets of the global batch, in nats, including an auxiliary objective's loss."""

    fault: Fault | None
    loss_scale: float
    """fp16's loss scale in this step; 1 for other precisions."""

    learning_rate: float
    targets: int
    candidates: float

    engine_metrics: Mapping[str, float]
    """The engine's metrics on this rank, by their names in the log."""

    gathered: GatheredMetrics

    cpu_seconds: float
    """CPU time of this rank's process, including its loader's threads."""


def train_step(
    engine: Engine,
    batches: StepBatches,
    learning_rate: float,
    device: torch.device,
    step_metrics: StepMetrics,
    fault_policy: FaultPolicy,
    recent_losses: list[float],
) -> StepReport:
    """Runs forward and backward of every micro-batch, then one update, unless the fault policy or the engine skips it.
    Collective."""
    cpu_seconds = time.process_time()
    engine_metrics = engine.prepare_step(batches.row_plan)  # fetches rows of the embedding
    losses = [engine.micro_step(micro.to(device)) for micro in batches.micro_batches]
    # a micro-batch's loss is its sum over targets, times data_ranks * accumulation / (the step's targets): the mean of
    # all losses is the mean over the step's targets
    gathered = step_metrics.gather(losses, engine.forward_timer)
    loss_scale = engine.loss_scale.value
    fault = fault_policy.find_loss_fault(gathered.losses_WA, recent_losses)
    skip = fault_policy.must_skip(fault)
    result = engine.skip_step() if skip else engine.step(learning_rate)
    return StepReport(
        **vars(result),
        loss=float(gathered.losses_WA.mean()),
        fault=fault if skip else gradient_fault(result, engine.loss_scale.is_dynamic) or fault,
        loss_scale=loss_scale,
        learning_rate=learning_rate,
        targets=batches.targets,
        candidates=batches.candidates,
        engine_metrics=engine_metrics,
        gathered=gathered,
        cpu_seconds=time.process_time() - cpu_seconds,
    )


def seed_step(seed: int, first_sample: int, data_rank: int, device: torch.device) -> None:
    """Seeds dropout on `device` from the step's first sample, so that a resumed run has the same dropout.

    Avoids `torch.manual_seed`, which takes some 4 ms: it records a stack trace for each device type not in use here.
    """
    step_seed = ((seed * 1_000_003 + first_sample) * 65_537 + data_rank) % 2**63
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)


class Stopwatch:
    """Measures the seconds of training, without pauses; starts at `seconds` when it is created."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """The elapsed seconds."""
        return time.monotonic() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block."""
        pause_start = time.monotonic()
        yield
        self._start += time.monotonic() - pause_start


# Model FLOPs utilization (MFU) of the devices (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).


@dataclass(frozen=True)
class Utilization:
    """Computes the utilization of `devices` devices with a peak of `device_peak` FLOPS each (None: unknown)."""

    fixed_flops: float
    """FLOPs per token, without the scores of candidates."""

    row_flops: float
    """FLOPs per token for each row (candidate) that its output is scored against."""

    padded_vocab_size: int
    devices: int
    device_peak: float | None

    @classmethod
    def for_device(cls, device: torch.device, plan: RunPlan) -> Utilization:
        """The utilization of a run in which each rank has a device like `device`; the peak of CPUs is unknown."""
        fixed, with_row = (run_flops(plan.config, rows, plan.data_ranks).total for rows in (0, 1))
        device_peak = peak_flops(device_name(device), plan.config.engine.precision)
        return cls(fixed, with_row - fixed, plan.config.model.padded_vocab_size(), plan.ranks, device_peak)

    def metrics(self, tokens_per_second: float, candidates: float) -> dict[str, float]:
        """`flops_per_second` of one device, and `mfu`, its ratio to the device's peak, if that is known. Includes the
        matrices of the blocks, attention over full rows, and scores of the targets' candidates; excludes recomputation
        by activation checkpointing. `candidates`: mean number of candidates per output, 0 for the whole vocabulary."""
        flops = self.fixed_flops + self.row_flops * (round(candidates) or self.padded_vocab_size)
        flops_per_second = flops * tokens_per_second / self.devices
        mfu = {"mfu": flops_per_second / self.device_peak} if self.device_peak else {}
        return {"flops_per_second": flops_per_second} | mfu


def device_name(device: torch.device) -> str:
    """The product name of a GPU; "cpu" for CPUs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# Peak dense operations per second, from NVIDIA's data sheets of V100, T4, A10, A100, RTX 3090 and 4090, L4, L40S, H100,
# H200 and B200.


HALF_PRECISION_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""In bf16, or fp16 on devices without it, by words of torch's device name; the longest match counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak operations per second of a device; None for an unknown device, and for fp32."""
    words = set(device_name.replace("-", " ").split())  # "H100 PCIe" matches "NVIDIA H100 PCIe", "A10" not "A100"
    names = [name for name in HALF_PRECISION_PEAKS if words.issuperset(name.split())]
    if precision == "fp32" or not names:
        return None
    return HALF_PRECISION_PEAKS[max(names, key=len)]
