"""The learning rate over a run, as a share of its peak."""

from __future__ import annotations

import math

from megahead.config import ScheduleConfig


def learning_rate_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Share of the peak rate for the update after `step` finished ones (0 is the first update), in [0, 1].

    Warm-up is linear and ends with the peak at step `warmup_steps - 1`, so no update is made at rate 0. From there
    cosine and triangular (linear) reach `final_ratio` at step `total_steps - 1`; wsd stays at the peak and falls
    linearly over the last `decay_steps`; constant stays. Beyond the last step the ratio does not change.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    last = total_steps - 1
    peak = max(schedule.warmup_steps - 1, 0)
    if schedule.name == "wsd" and schedule.decay_steps is not None:
        peak = last - schedule.decay_steps
    progress = min(max((step - peak) / max(last - peak, 1), 0.0), 1.0)
    fallen = (1 - math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else progress
    return 1.0 - (1.0 - schedule.final_ratio) * fallen
