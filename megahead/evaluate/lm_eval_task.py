"""Runs lm-eval's own `hf` model with a model in memory on one local task, without its scan of 14,000 other tasks."""

from __future__ import annotations

import io
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import psutil
import torch
from lm_eval import evaluator
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megahead.convert import context_of
from megahead.evaluate.harness_tasks import task_rows, write_tasks
from megahead.evaluate.language_models import LanguageModel
from megahead.evaluate.results import Score, TaskResult

_BOOTSTRAPS = 1000  # resamples for standard errors that have no formula: 2 s for all of LAMBADA
_LOGIT_COPIES = 3  # in memory at once in lm-eval: logits, their log-softmax, and what it gathers from
_LARGEST_BATCH = 32


def evaluate_with_lm_eval(
    model: LanguageModel, name: str, file: Path, limit: int | None, batch_size: int | None
) -> TaskResult:
    """The result of one of lm-eval's tasks on `file`; batch_size None: what fits memory (`fitting_batch_size`)."""
    size = batch_size or fitting_batch_size(model.model, _longest(name, file, model.tokenizer), _free_bytes())
    with tempfile.TemporaryDirectory() as folder, _quiet():
        manager = TaskManager(include_path=str(write_tasks({name: file}, Path(folder))), include_defaults=False)
        tasks = list(manager.load([name])["tasks"].values())
        lm = _Counting(pretrained=model.model, tokenizer=model.tokenizer, batch_size=size)
        found: Mapping[str, Any] = simple_evaluate(
            lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False
        )
    return _result(name, found, limit, lm.cut)


def fitting_batch_size(model: Any, tokens: int, free_bytes: int) -> int:
    """Examples of `tokens` tokens each whose logits and residual streams take at most a quarter of `free_bytes`."""
    config = model.config
    tokens, inner = min(tokens, context_of(model)), getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    floats = tokens * (_LOGIT_COPIES * config.vocab_size + 2 * inner + 8 * config.hidden_size)
    return max(1, min(_LARGEST_BATCH, free_bytes // 4 // int(4 * floats)))


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available)


def _longest(name: str, file: Path, tokenizer: Any) -> int:
    """Tokens of the longest example, its choices included."""
    longest = max((" ".join(map(str, row.values())) for row in task_rows(name, file)), key=len)
    return len(tokenizer(longest, verbose=False)["input_ids"])


def _result(task: str, found: Mapping[str, Any], limit: int | None, cut: int) -> TaskResult:
    """Our form of lm-eval's result, which has `acc,none` and `acc_stderr,none` side by side in one dict."""
    values = found["results"][task]
    scores = []
    for metric in found["higher_is_better"][task]:
        stderr = values.get(f"{metric}_stderr,none")
        scores.append(
            Score(metric, float(values[f"{metric},none"]), None if stderr in (None, "N/A") else float(stderr))
        )
    return TaskResult(task, found["n-samples"][task]["effective"], scores, limit, cut)


class _Counting(HFLM):  # type: ignore[misc] # lm-eval has no types
    """lm-eval's model, which counts the requests that it cuts."""

    cut = 0

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
        self.cut += sum(len(text) + len(continuation) > self.max_length + 1 for _, text, continuation in requests)
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
    no_git = patch.object(
        evaluator, "get_git_commit_hash", return_value=None
    )  # asks git, whose errors nothing redirects
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), no_git:
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
