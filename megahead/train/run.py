"""The result of a run, for the program that called it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from megahead.run_folder import RunFolder
from megahead.train.preemption import Ending
from megahead.train.state import TrainingState


@dataclass(frozen=True)
class Run:
    """A run as `pretrain` left it; the same on every rank."""

    folder: RunFolder
    """What exports and evaluations ask for: a path that knows its `metrics`, `checkpoints`, `config` and the rest."""

    step: int
    """Optimizer steps applied, all sessions together."""

    ending: Ending
    """`finished`, `out of time` (`training.max_seconds`), or `stopped` by a signal or Ctrl-C, saved each time."""

    held_out_perplexity: float | None
    """exp(loss) of the last evaluation, with the head that training evaluates with; None where there was none."""

    @staticmethod
    def of(folder: RunFolder, state: TrainingState, ending: Ending) -> Run:
        """The result of a run that ended with the counters in `state`."""
        found = state.validation
        return Run(folder, state.step, ending, None if found is None else exp(min(found["loss"], 700.0)))
