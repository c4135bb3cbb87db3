"""A plan: a config and the number of ranks it runs on, and what follows from both, computed once at the very start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megahead.config.deepspeed import deepspeed_config, zero_stage
from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.run import RunConfig


@dataclass(frozen=True)
class RunPlan:
    """A config and the number of ranks it runs on, with all that follows from both."""

    config: RunConfig
    ranks: int

    data_ranks: int
    """Data-parallel ranks: each batch is split over them. All ranks / this are tensor-parallel ranks."""

    deepspeed: dict[str, Any]
    """DeepSpeed's settings: the complete content of its JSON."""

    zero_stage: int
    """What is partitioned over data ranks: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""

    precision_by_auto: bool = False
    """Whether `engine.precision` is what `auto` came to."""

    @staticmethod
    def of(config: RunConfig, ranks: int = 1, device: str | None = None, *, precision_by_auto: bool = False) -> RunPlan:
        """ConfigError if `config` cannot be split over `ranks`, or DeepSpeed's settings contradict it; UserError if
        these are in a file that cannot be read.

        `device`: cpu or cuda, where the ranks run; by default what `engine.device` says, with `auto` counted as cuda,
        since plans for other machines are mostly plans for GPUs.
        """
        data_ranks = config.parallel.data_ranks(ranks)
        device = device or ("cpu" if config.engine.device == "cpu" else "cuda")
        deepspeed = deepspeed_config(config, data_ranks, device)
        return RunPlan(config, ranks, data_ranks, deepspeed, zero_stage(deepspeed), precision_by_auto)

    @property
    def zero(self) -> Mapping[str, Any]:
        """DeepSpeed's section on ZeRO."""
        section: Mapping[str, Any] = self.deepspeed.get("zero_optimization", {})
        return section

    @property
    def accumulation_steps(self) -> int:
        """Forward-backward passes per optimizer step on each data rank."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    def group_samples(self, stored: int | None = None) -> int:
        """Samples in a candidate group; `stored`: their number in the checkpoint that is resumed."""
        return resolve_candidate_group_samples(self.config.objective, self.config.batch, self.data_ranks, stored)
