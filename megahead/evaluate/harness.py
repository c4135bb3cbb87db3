"""Runs lm-eval's own `hf` model on Hugging Face folders, for local tasks and without its scan of 14,000 others."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megahead.convert import load_causal, load_tokenizer_folder
from megahead.evaluate.tasks import task_config

_BOOTSTRAPS = 1000  # resamples behind a standard error without a formula: 2 s for the whole of LAMBADA


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    metric: str
    value: float
    stderr: float | None
    """Standard error as lm-eval gives it (bootstrapped for perplexity); None where it has none."""


@dataclass(frozen=True)
class TaskResult:
    """What a model reaches on a task."""

    task: str
    samples: int
    scores: list[Score]


@dataclass(frozen=True)
class HarnessResult:
    """What a model reaches on all tasks asked for."""

    model: str
    tasks: list[TaskResult]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate_harness(
    model_dir: Path, files: Mapping[str, Path], *, limit: int | None = None, batch_size: int = 8
) -> HarnessResult:
    """Scores the language model in `model_dir` (its tokenizer beside it) on the tasks of `files`, in fp32.

    files: task name to its data, from `task_files`. limit: only the first examples of each. On a GPU if there is one.
    Raises CheckpointError for a folder without its own head or tokenizer. Cost: logits of a whole batch at once,
    batch_size x tokens x vocabulary.
    """
    begin = time.monotonic()
    tokenizer = load_tokenizer_folder(model_dir)
    model = load_causal(model_dir).to("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(model_dir.name))
        stack.enter_context(_quiet())
        manager = _task_manager(files, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        tasks = list(manager.load(list(files))["tasks"].values())
        total = sum(min(len(task.eval_docs), limit or len(task.eval_docs)) for task in tasks)
        progress.update(progress.task_ids[0], total=total)
        model.register_forward_hook(lambda _, __, outputs: progress.advance(progress.task_ids[0], len(outputs.logits)))
        found = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
        )
        progress.update(progress.task_ids[0], completed=total)
    return HarnessResult(str(model_dir), [_result(name, found) for name in files], time.monotonic() - begin)


def _task_manager(files: Mapping[str, Path], folder: Path) -> TaskManager:
    """Knows the tasks of `files` only; `folder` holds their definitions and the data as lm-eval caches it."""
    definitions = folder / "tasks"
    definitions.mkdir()
    for name, file in files.items():
        content = task_config(name, file, folder / "cache")
        (definitions / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return TaskManager(include_path=str(definitions), include_defaults=False)


def _result(task: str, found: Mapping[str, Any]) -> TaskResult:
    """lm-eval keeps `acc,none` and `acc_stderr,none` side by side in one dict."""
    values = found["results"][task]
    scores = []
    for metric in found["higher_is_better"][task]:
        stderr = values.get(f"{metric}_stderr,none")
        scores.append(
            Score(metric, float(values[f"{metric},none"]), None if stderr in (None, "N/A") else float(stderr))
        )
    return TaskResult(task, found["n-samples"][task]["effective"], scores)


def _progress(name: str) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
    progress.add_task(name, total=None)
    return progress


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lm-eval's bars, prints and notes to itself, and its bootstrap in this process; errors still raise."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
