"""Model FLOPs utilization (MFU): which share of the devices' peak a speed is (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megahead.config import RunConfig, RunPlan
from megahead.estimate import peak_flops, run_flops


@dataclass(frozen=True)
class Utilization:
    """For a run on `devices` devices with a peak of `device_peak` operations per second each (None: not known)."""

    config: RunConfig
    devices: int
    device_peak: float | None

    @classmethod
    def on(cls, device: torch.device, plan: RunPlan) -> Utilization:
        """For a run whose ranks each have a device like this one; CPUs have no known peak."""
        return cls(plan.config, plan.ranks, peak_flops(device_name(device), plan.config.engine.precision))

    def of(self, tokens_per_second: float, candidates: float) -> dict[str, float]:
        """`flops_per_second` of one device, and `mfu`, its share of the device's peak, if that is known.

        Counts the operations that the model needs (body, attention over whole rows, scores of the targets' candidates);
        what activation checkpointing computes again does not count. `candidates`: mean number that an output is scored
        against, 0 for the whole vocabulary.
        """
        rows = round(candidates) or self.config.model.padded_vocab_size()
        speed = run_flops(self.config, rows).total * tokens_per_second / self.devices
        return {"flops_per_second": speed} | ({"mfu": speed / self.device_peak} if self.device_peak else {})


def device_name(device: torch.device) -> str:
    """Its product name; cpu for all CPUs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
