"""How much of the devices' peak a speed is: model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, B)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megahead.config import RunConfig, RunPlan
from megahead.estimate import peak_flops, training_flops


@dataclass(frozen=True)
class Utilization:
    """For a run on `devices` devices of `device_peak` operations a second each (None: not known)."""

    config: RunConfig
    devices: int
    device_peak: float | None

    @classmethod
    def on(cls, device: torch.device, plan: RunPlan) -> Utilization:
        """For a run whose ranks each have a device like this one; CPUs have no known peak."""
        return cls(plan.config, plan.ranks, peak_flops(device_name(device), plan.config.engine.precision))

    def of(self, tokens_per_second: float, candidates: float) -> dict[str, float]:
        """{"flops_per_second": a device's, and where its peak is known "mfu": its share of that}.

        Operations that the model needs (body, attention over whole rows, candidates of the targets: an encoder masks
        few tokens); what is computed again for activation checkpointing does not count. `candidates` 0: the whole
        vocabulary.
        """
        rows = round(candidates) or self.config.model.padded_vocab_size()
        length, targets = self.config.data.sequence_length, self.config.targets_per_row()
        per_token = training_flops(self.config.model, length, rows, targets=targets).total
        speed = per_token * tokens_per_second / self.devices
        return {"flops_per_second": speed} | ({"mfu": speed / self.device_peak} if self.device_peak else {})


def device_name(device: torch.device) -> str:
    """Its product name; cpu for all CPUs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
