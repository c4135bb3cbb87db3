"""Scores models on local task files, lm-eval's and BLiMP's; models are Hugging Face folders, runs or checkpoints.

megahead eval-harness --model runs/headless runs/vanilla --data data --tasks lambada_openai,sciq --output scores.json

Checkpoints of one or several runs give a curve over tokens:
megahead eval-harness --model runs/headless/checkpoints/step-* --data data --tasks sciq --curve sciq.png

An interrupted call continues where it was: results in `--output` are not computed again. lm-eval's own command line
gives the same numbers: write its definitions with `--write-tasks DIR`, then
lm_eval run --model hf --model_args pretrained=EXPORT,dtype=float32 --include_path DIR/tasks --tasks sciq
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from megahead.commands import checkpoint_path
from megahead.errors import FieldError, existing_path, require_at_least
from megahead.evaluate.harness_tasks import TASKS, require_model_kind, task_files, write_tasks
from megahead.evaluate.results import ResultsFile, Score, TaskResult
from megahead.report.tables import terminal, to_rich

PAPER_TASKS = "lambada_openai,arc_easy,arc_challenge,boolq,crows_pairs_english,race,sciq,pubmedqa"
"""The tasks of the paper except QASPER (`qasper_bool`), whose data few people have."""

ENCODER_TASKS = "blimp"
"""`blimp_paradigms` scores the same pairs, and prints 67 numbers more."""


def main() -> None:
    arguments = _parser().parse_args()
    require_at_least(1, limit=arguments.limit, batch_size=arguments.batch_size)
    if not arguments.model and not arguments.write_tasks:
        raise FieldError("--model", "name a model, unless --write-tasks is given", got="missing")
    tasks = (arguments.tasks or default_tasks(arguments.model)).split(",")
    files = task_files(tasks, arguments.data, arguments.cloze, arguments.text, arguments.items, arguments.articles)
    console = terminal()
    if arguments.write_tasks:
        console.print(f"wrote {write_tasks(files, arguments.write_tasks)}", soft_wrap=True)
    results_file = ResultsFile(arguments.output)
    from megahead.hf.export import ensure_hf_folder, holds_encoder

    for model in arguments.model:
        require_model_kind(files, encoder=holds_encoder(model))
        if "next_item" in files:
            from megahead.evaluate.next_item import require_same_items

            require_same_items(model, files["next_item"])
    folders = {model: ensure_hf_folder(model) for model in arguments.model}
    progress = {}
    if arguments.curve:
        from megahead.report.figures import checkpoint_progress

        progress = checkpoint_progress(folders)
    options = results_file, arguments.limit, arguments.batch_size
    results = {str(model): evaluate_model(model, folder, files, *options) for model, folder in folders.items()}
    if results:
        console.print(table(results))
    for name, scored in results.items():
        for note in filter(None, (task.truncation_note() for task in scored)):
            console.print(f"{name}, {note}", soft_wrap=True)
    if arguments.output and results:
        console.print(f"wrote {arguments.output}", soft_wrap=True)
    if progress:
        from megahead.report.figures import TaskPoint, draw_task_curves, save_figure

        points = [
            TaskPoint(run, tokens, task.task, score.metric, score.value, score.stderr, hours)
            for (run, tokens, hours), scored in zip(progress.values(), results.values(), strict=True)
            for task in scored
            for score in task.scores
        ]
        console.print(f"wrote {save_figure(draw_task_curves(points), arguments.curve)}", soft_wrap=True)


def default_tasks(models: Sequence[Path]) -> str:
    """The paper's tasks; if one of the models is an encoder, tasks that suit both kinds of models."""
    if not models:
        return PAPER_TASKS
    from megahead.hf.export import holds_encoder

    return ENCODER_TASKS if any(map(holds_encoder, models)) else PAPER_TASKS


def evaluate_model(
    model: Path,
    folder: Path,
    files: Mapping[str, Path],
    results_file: ResultsFile,
    limit: int | None,
    batch_size: int | None,
) -> list[TaskResult]:
    """Results of all tasks in the order of `files`. Reuses those in `results_file`, and adds the others to it."""
    results = {task: results_file.find(model, folder, task, file, limit) for task, file in files.items()}
    missing = {task: file for task, file in files.items() if results[task] is None}
    if missing:
        from megahead.evaluate.harness import evaluate_tasks

        for result in evaluate_tasks(folder, missing, limit=limit, batch_size=batch_size):
            results_file.add(model, folder, files[result.task], result)
            results[result.task] = result
    return [result for result in results.values() if result]


def table(results: Mapping[str, Sequence[TaskResult]]) -> Table:
    """A row for each metric of a task, a column for each model; values with their standard errors."""
    rows = []
    for tasks in zip(*results.values(), strict=True):
        for scores in zip(*(task.scores for task in tasks), strict=True):
            row = {"task": tasks[0].task, "metric": scores[0].metric, "samples": str(tasks[0].samples)}
            rows.append(row | {model: cell(score) for model, score in zip(results, scores, strict=True)})
    return to_rich(rows, right=["samples", *results])


def cell(score: Score) -> str:
    """The value, with ± its standard error if known."""
    return f"{score.value:.4g}" + ("" if score.stderr is None else f" ± {score.stderr:.2g}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=checkpoint_path, nargs="+", default=[], metavar="DIR", help="HF folder, run, checkpoint")
    default = f"default: {PAPER_TASKS}; with an encoder {ENCODER_TASKS}"
    add("--tasks", metavar="A,B", help=f"of {', '.join(TASKS)} ({default})")
    published = "folder of task files as published (DIR/lambada/lambada_test.jsonl)"
    add("--data", type=existing_path, metavar="DIR", help=published)
    add("--cloze", type=existing_path, metavar="FILE", help='jsonl of {"text"}: its last word is predicted')
    add("--text", type=existing_path, metavar="FILE", help="text for the task bits_per_byte")
    add("--items", type=Path, metavar="PREFIX", help="dataset of item sequences for the task next_item")
    articles = 'for the task retrieval: jsonl of {"title", "text"} or {"query", "positive"}, or a folder of BEIR'
    add("--articles", type=existing_path, metavar="PATH", help=articles)
    add("--limit", type=int, metavar="N", help="only the first N examples of each task or paradigm")
    add("--batch-size", type=int, metavar="N", help="examples at once (default: what fits memory)")
    add("--output", type=Path, metavar="JSON", help="store results there, and continue from them")
    add("--curve", type=Path, metavar="PNG", help="draw scores against the tokens of training")
    add("--write-tasks", type=Path, metavar="DIR", help="also write the tasks for lm-eval's command line")
    return parser
