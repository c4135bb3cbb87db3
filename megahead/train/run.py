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
    """Exports and evaluations take it. It knows the paths in it: `folder.metrics`, `folder.checkpoints` and so on."""

    step: int
    """Optimizer steps applied in all sessions (launches of the run) together."""

    ending: Ending
    """`finished`, `out of time` (`training.max_seconds`), or `stopped` by a signal or Ctrl-C. Saved in each case, but
    for one that was stopped before its first step."""

    held_out_perplexity: float | None
    """exp(loss) of the last evaluation during training (of masked diffusion an upper bound); None if there was none."""

    @staticmethod
    def of(folder: RunFolder, state: TrainingState, ending: Ending) -> Run:
        """The result of a run that ended with the counters in `state`."""
        found = state.validation
        return Run(folder, state.step, ending, None if found is None else exp(min(found["loss"], 700.0)))
