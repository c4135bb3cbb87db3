"""Scores models with lm-eval on local task files; models are Hugging Face folders, runs or checkpoints.

tools/eval_harness.py --model runs/headless runs/vanilla --tasks cloze --cloze demo/cloze.jsonl --output scores.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megahead.convert import hf_folder
from megahead.errors import FieldError, run_command
from megahead.evaluate.harness import HarnessResult, Score, evaluate_harness
from megahead.evaluate.tasks import TASKS, task_files


def main() -> None:
    arguments = _parser().parse_args()
    for name in ("limit", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise FieldError(f"--{name.replace('_', '-')}", "be at least 1", got=value)
    files = task_files(arguments.tasks.split(","), arguments.data, arguments.cloze)
    folders = {model: hf_folder(model) for model in arguments.model}
    results = [
        replace(
            evaluate_harness(folder, files, limit=arguments.limit, batch_size=arguments.batch_size), model=str(model)
        )
        for model, folder in folders.items()
    ]
    console = Console()
    console.print(table(results))
    if arguments.output:
        write(results, arguments.output)
        console.print(f"wrote {arguments.output}", soft_wrap=True, highlight=False)


def table(results: Sequence[HarnessResult]) -> Table:
    """A row for each model and task; values with their standard errors."""
    metrics = list(dict.fromkeys(score.metric for result in results for task in result.tasks for score in task.scores))
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("model", "task"):
        shown.add_column(column, overflow="fold")
    for column in ("samples", *metrics):
        shown.add_column(column, justify="right", no_wrap=True)
    for result in results:
        for task in result.tasks:
            cells = {score.metric: cell(score) for score in task.scores}
            values = [cells.get(metric, "") for metric in metrics]
            shown.add_row(result.model, task.task, str(task.samples), *values)
    return shown


def cell(score: Score) -> str:
    """Value ± standard error, where there is one."""
    return f"{score.value:.4g}" + ("" if score.stderr is None else f" ± {score.stderr:.2g}")


def write(results: Sequence[HarnessResult], output: Path) -> None:
    """All results as one JSON file, in place of an older one."""
    content = {"lm_eval": version("lm-eval"), "models": [result.record() for result in results]}
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Score models with lm-eval on local task files.")
    parser.add_argument(
        "--model", type=Path, nargs="+", required=True, metavar="DIR", help="HF folder, run, checkpoint"
    )
    parser.add_argument("--tasks", required=True, metavar="A,B", help=f"of {', '.join(TASKS)}")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of task files (DIR/lambada/lambada_test.jsonl)"
    )
    parser.add_argument("--cloze", type=Path, metavar="FILE", help='jsonl of {"text"}: its last word is predicted')
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="examples at once (default: 8)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the results there")
    return parser


if __name__ == "__main__":
    run_command(main)
