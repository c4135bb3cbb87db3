"""Scores Hugging Face folders on tasks with local files: lm-eval's tasks by its own `hf` model, others by our code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megahead.convert import is_encoder
from megahead.evaluate.harness_tasks import TASKS, OwnTask, require_for_encoder, task_rows
from megahead.evaluate.language_models import LanguageModel, open_language_model
from megahead.evaluate.progress import forward_progress
from megahead.evaluate.results import HarnessResult, TaskResult


def evaluate_harness(
    model_dir: Path, files: Mapping[str, Path], *, limit: int | None = None, batch_size: int | None = None
) -> HarnessResult:
    """Scores the language model in `model_dir` on all tasks of `files`; see `evaluate_tasks`."""
    begin = time.monotonic()
    tasks = list(evaluate_tasks(model_dir, files, limit=limit, batch_size=batch_size))
    return HarnessResult(str(model_dir), tasks, time.monotonic() - begin)


def evaluate_tasks(
    model_dir: Path, files: Mapping[str, Path], *, limit: int | None = None, batch_size: int | None = None
) -> Iterator[TaskResult]:
    """Scores the language model in `model_dir` (its tokenizer beside it), in fp32, and yields task by task.

    files: task name to its data, from `task_files`. limit: only this many first examples of each task (of each
    paradigm). On a GPU if there is one. batch_size: examples at once; None: what fits into free memory.
    Raises CheckpointError for a folder without head or tokenizer, FieldError for an encoder and a task that needs a
    decoder.
    """
    if is_encoder(model_dir):
        require_for_encoder(files)
    model = open_language_model(model_dir, batch_size)
    for name, file in files.items():
        task = TASKS[name]
        with forward_progress(model.model, f"{model_dir.name}: {name}"):
            if isinstance(task, OwnTask):
                yield _score(task, model, name, file, limit)
            else:
                from megahead.evaluate.lm_eval_task import evaluate_with_lm_eval  # imports lm-eval: seconds

                yield evaluate_with_lm_eval(model, name, file, limit, batch_size)


def _score(task: OwnTask, model: LanguageModel, name: str, file: Path, limit: int | None) -> TaskResult:
    rows = task_rows(name, file, limit)
    return TaskResult(name, len(rows), task.score(model, rows), limit)
