"""Draws the curves of one or several runs into one PNG.

megahead plot runs/headless runs/vanilla --output curves.png

Runs that evaluated tasks during training (`tasks` of the config) get a second PNG, curves-tasks.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.report.read import RunMetrics, read_all_metrics
from megahead.report.tables import terminal, to_rich
from megahead.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (or its metrics.jsonl)")
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: curves.png in the first run's folder")
    arguments = parser.parse_args()
    runs = read_all_metrics(arguments.runs)
    first = arguments.runs[0]
    output = arguments.output or RunFolder(first.parent if first.suffix == ".jsonl" else first).curves
    from megahead.report.figures import draw_curves, draw_task_curves, logged_task_scores, save_figure

    save_figure(draw_curves(runs), output)
    console = terminal()
    console.print(to_rich([last_values(run) for run in runs]))
    console.print(f"wrote {output}", soft_wrap=True, highlight=False)
    points = [point for run in runs for point in logged_task_scores(run)]
    if points:
        path = save_figure(draw_task_curves(points), output.with_name(f"{output.stem}-tasks{output.suffix}"))
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def last_values(run: RunMetrics) -> dict[str, object]:
    """The last values of a run, one row of the printed table."""
    last = max((*run.training, *run.validation), key=lambda record: record["step"])
    row: dict[str, object] = {"run": run.name, **{key: last[key] for key in ("step", "tokens", "seconds")}}
    if run.training:
        row["loss"] = run.training[-1]["loss"]
    for key in ("perplexity", "bits_per_byte", "accuracy"):
        row[key] = run.validation[-1].get(key) if run.validation else None
    if run.validation and run.validation[-1].get("upper_bound"):
        row["upper bounds"] = True
    return row
