"""Whole runs, some of whose rows are bad."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.train.run import pretrain

BAD = 24
"""First sample of the fourth step of a small run."""


def run_with(
    group: Group, config: RunConfig, factor: float, bad: tuple[int, ...] = (BAD,), resume: str = "auto"
) -> str:
    """A run in which the losses of some micro-batches of the last rank come out `factor` times as high."""
    step = StepLoader.step

    def bad_step(loader: StepLoader, first_sample: int) -> StepBatches:
        batches = step(loader, first_sample)
        if first_sample in bad and group.rank == group.size - 1:
            micro = batches.micro_batches[1]
            if isinstance(micro.loss_weight, Tensor):
                micro.loss_weight.mul_(factor)
            else:
                batches.micro_batches[1] = replace(micro, loss_weight=micro.loss_weight * factor)
        return batches

    StepLoader.step = bad_step  # type: ignore[method-assign]
    try:
        return pretrain(config, Launch(), resume).ending
    except UserError as error:
        return str(error)
