"""A phase of a run that is ready to train: the parts that the loop works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megahead.config import RunConfig
from megahead.pretraining import Feed
from megahead.train.copier import Copier
from megahead.train.evaluation import Evaluation
from megahead.train.faults import Guard
from megahead.train.health import Health
from megahead.train.meters import Meters
from megahead.train.preemption import StopRequest
from megahead.train.progress import Progress
from megahead.train.saver import Saver
from megahead.train.state import TrainingState
from megahead.train.tally import Tally
from megahead.train.task_evaluation import TaskEvaluation


@dataclass(frozen=True)
class Training:
    """These parts; `setup` puts them together."""

    progress: Progress
    """What is trained, and how far it has come."""

    feed: Feed
    tally: Tally
    guard: Guard
    health: Health
    meters: Meters
    stop: StopRequest
    evaluation: Evaluation | None
    tasks: TaskEvaluation | None
    saver: Saver
    copier: Copier
    device: torch.device

    evaluate_first: bool
    """Whether it begins with weights that learned something else, another phase's or those of `init`, so that an
    evaluation shows what these are worth to it."""

    @property
    def config(self) -> RunConfig:
        """That of the phase."""
        return self.progress.phase.config

    @property
    def until(self) -> int:
        """Steps of the run at which the phase ends."""
        return self.progress.phase.steps.stop

    @property
    def state(self) -> TrainingState:
        """The counters of the run."""
        return self.progress.state
