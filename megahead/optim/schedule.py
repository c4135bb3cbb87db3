"""The learning rate over a run, as a share of its peak: each schedule a function, and a line in `SCHEDULES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from megahead.config import ScheduleConfig


def learning_rate_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Share of the peak rate for the update after `step` finished ones (0 is the first update), in [0, 1].

    Warm-up is linear and ends with the peak at step `warmup_steps - 1`, so no update is made at rate 0. From there
    the rate falls as `SCHEDULES` says. Beyond the last step the ratio does not change.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    return 1.0 - (1.0 - schedule.final_ratio) * SCHEDULES[schedule.name](schedule, step, total_steps - 1)


def cosine(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Half a cosine from the peak to the last step."""
    return (1 - math.cos(math.pi * triangular(schedule, step, last))) / 2


def triangular(schedule: ScheduleConfig, step: int, last: int) -> float:
    """A line from the peak to the last step."""
    return _progress(max(schedule.warmup_steps - 1, 0), step, last)


def constant(schedule: ScheduleConfig, step: int, last: int) -> float:
    """The peak throughout."""
    return 0.0


def wsd(schedule: ScheduleConfig, step: int, last: int) -> float:
    """Stable at the peak, then a line over the last `decay_steps`."""
    assert schedule.decay_steps is not None
    return _progress(last - schedule.decay_steps, step, last)


Fall = Callable[[ScheduleConfig, int, int], float]
"""Of the way from the peak to `final_ratio`, how much lies behind at a step after warm-up, 0 to 1; arguments: the
settings, the step, and the last step, beyond which it is what it was there."""

SCHEDULES: Mapping[str, Fall] = {"cosine": cosine, "triangular": triangular, "constant": constant, "wsd": wsd}
"""By `schedule.name`."""


def _progress(begin: int, step: int, last: int) -> float:
    """Share of the steps from `begin` to `last` that lie behind."""
    return min(max((step - begin) / max(last - begin, 1), 0.0), 1.0)
