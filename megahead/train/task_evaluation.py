"""Evaluates tasks during training: one export, and the tasks divided among the ranks."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

from megahead.config import RunConfig, TasksConfig
from megahead.distributed import Group
from megahead.errors import UserError
from megahead.evaluate.results import TaskResult
from megahead.run_folder import RunFolder
from megahead.train.preflight import task_files_of


class TaskEvaluation:
    """The tasks of a run. Their files are checked when it is created, so that a mistake is an error before training."""

    def __init__(self, config: TasksConfig, world_group: Group, *, encoder: bool) -> None:
        self.every = config.every
        self._limit = config.limit
        self._files = task_files_of(config, encoder)
        self._world_group = world_group

    @classmethod
    def of(cls, config: RunConfig, world_group: Group) -> TaskEvaluation | None:
        """The evaluation that a run's `tasks` ask for, if any."""
        if config.tasks is None:
            return None
        return cls(config.tasks, world_group, encoder=config.model.is_encoder())

    def run(self, checkpoint: Path) -> list[TaskResult]:
        """Results of all tasks in their order, for the model in `checkpoint`, with the best head it has. Collective.

        Rank 0 exports, rank r of W evaluates tasks r, r + W, ... in fp32, and the export is removed. Does not restore
        torch's random state: every step seeds its own. UserError if the export fails.
        """
        from megahead.evaluate.harness import evaluate_tasks  # imports transformers: seconds

        folder = RunFolder.of(checkpoint).exports / "evaluated"
        problem = self._world_group.broadcast_object(
            _export(checkpoint, folder) if self._world_group.rank == 0 else None
        )
        if problem is not None:
            raise UserError(problem)
        mine = dict(list(self._files.items())[self._world_group.rank :: self._world_group.size])
        shares = self._world_group.all_gather_objects(
            list(evaluate_tasks(folder, mine, limit=self._limit)) if mine else []
        )
        if self._world_group.rank == 0:
            shutil.rmtree(folder)
        found = {result.task: result for result in chain.from_iterable(shares)}
        return [found[name] for name in self._files]


def _export(checkpoint: Path, folder: Path) -> str | None:
    """The error's sentence if the export fails, else None."""
    from megahead.convert import export
    from megahead.convert.export_heads import best_head
    from megahead.convert.source import TrainedModel

    try:
        export(checkpoint, folder, best_head(TrainedModel.open(checkpoint)))
    except UserError as error:
        return str(error)
    return None
