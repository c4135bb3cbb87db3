"""Scores models on tasks with local files: lm-eval's own, minimal pairs, bits per byte."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
from lm_eval import evaluator
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import Progress, TextColumn

from megahead.errors import DataError
from megahead.evaluate.harness_tasks import TASKS, OwnTask, require_model_kind, task_rows, write_tasks
from megahead.evaluate.language_models import LanguageModel, open_language_model
from megahead.evaluate.results import Score, TaskResult
from megahead.hf.loading import context_length, is_encoder
from megahead.host_memory import available_memory


def evaluate_tasks(
    model_dir: Path, files: Mapping[str, Path], *, limit: int | None = None, batch_size: int | None = None
) -> Iterator[TaskResult]:
    """Scores the language model in `model_dir`, with its tokenizer, in fp32, and yields task by task.

    files: task name to its data, from `task_files`. limit: the first `limit` examples of each task (of each BLiMP
    paradigm) are scored. Uses a GPU if there is one. batch_size: examples at once; None: as many as fit into free
    memory. Raises CheckpointError for a folder without head or tokenizer, FieldError for a task that needs the other
    kind of model.
    """
    require_model_kind(files, encoder=is_encoder(model_dir))
    model = None
    for name, file in files.items():
        task = TASKS[name]
        if isinstance(task, OwnTask) and task.scores_folder:
            yield task.score(model_dir, file, limit, batch_size)
            continue
        model = model or open_language_model(model_dir, batch_size)
        with forward_progress(model.model, f"{model_dir.name}: {name}"):
            if isinstance(task, OwnTask):
                rows = task_rows(name, file, limit)
                yield TaskResult(name, len(rows), task.score(model, rows), limit)
            else:
                yield evaluate_with_lm_eval(model, name, file, limit, batch_size)


@contextmanager
def forward_progress(model: Any, description: str) -> Iterator[None]:
    """Shows the number of sequences that `model` has processed in the block, if stderr is a terminal."""
    columns = TextColumn("{task.description}", markup=False), TextColumn("sequence {task.completed}")
    progress = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
    bar = progress.add_task(description, total=None)

    def count(_: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        progress.advance(bar, len(inputs[0] if inputs else kwargs["input_ids"]))

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        with progress:
            yield
    finally:
        hook.remove()


# lm-eval's own `hf` model, with a model in memory, on one local task, without its scan of 14,000 other tasks.

_BOOTSTRAPS = 1000  # resamples for standard errors that have no formula: 2 s for all of LAMBADA
_LOGIT_COPIES = 3  # in memory at once in lm-eval: logits, their log-softmax, and what it gathers from
_LARGEST_BATCH = 32


def evaluate_with_lm_eval(
    model: LanguageModel, name: str, file: Path, limit: int | None, batch_size: int | None
) -> TaskResult:
    """Scores a model on one of lm-eval's tasks with the data in `file`; batch_size None: see `fitting_batch_size`."""
    free_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else available_memory()[0]
    if not batch_size:
        longest = max((" ".join(map(str, row.values())) for row in task_rows(name, file)), key=len)
        tokens = len(model.tokenizer(longest, verbose=False)["input_ids"])
        batch_size = fitting_batch_size(model.model, tokens, int(free_bytes))
    with tempfile.TemporaryDirectory() as folder, _quiet():
        manager = TaskManager(include_path=str(write_tasks({name: file}, Path(folder))), include_defaults=False)
        tasks = list(manager.load([name])["tasks"].values())
        lm = _TruncationCountingLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch_size)
        lm.task = name
        output: Mapping[str, Any] = simple_evaluate(
            lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False
        )
    values = output["results"][name]  # has `acc,none` and `acc_stderr,none` side by side
    scores = []
    for metric in output["higher_is_better"][name]:
        value, stderr = float(values[f"{metric},none"]), values.get(f"{metric}_stderr,none")
        scores.append(Score(metric, value, None if stderr in (None, "N/A") else float(stderr)))
    return TaskResult(name, output["n-samples"][name]["effective"], scores, limit, lm.num_truncated)


def fitting_batch_size(model: Any, tokens: int, free_bytes: int) -> int:
    """Returns how many examples of `tokens` tokens have logits and activations of at most a quarter of
    `free_bytes`; 1 to 32."""
    config = model.config
    tokens = min(tokens, context_length(model))
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    num_floats = tokens * (_LOGIT_COPIES * config.vocab_size + 2 * intermediate_size + 8 * config.hidden_size)
    return max(1, min(_LARGEST_BATCH, free_bytes // 4 // int(4 * num_floats)))


class _TruncationCountingLM(HFLM):  # type: ignore[misc] # lm-eval has no types
    """lm-eval's model, which counts the requests that it truncates; DataError for a continuation longer than
    the context, which lm-eval cannot score."""

    num_truncated, task = 0, ""

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
        longest = max((len(continuation) for *_, continuation in requests), default=0)
        if longest > self.max_length:
            raise DataError(
                f"{self.task} must have continuations of at most {self.max_length} tokens, the model's context, but "
                f"has one of {longest}; leave the task out."
            )
        self.num_truncated += sum(
            len(text) + len(continuation) > self.max_length + 1 for _, text, continuation in requests
        )
        return super()._loglikelihood_tokens(requests, *args, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses lm-eval's progress bars, prints and logs, and its worker processes; errors are still raised."""
    levels = {name: logging.getLogger(name).level for name in ("lm_eval", "transformers.tokenization_utils_base")}
    bars = datasets.are_progress_bars_disabled()
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    no_git = patch.object(evaluator, "get_git_commit_hash", return_value=None)  # git's errors cannot be redirected
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), no_git:
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
