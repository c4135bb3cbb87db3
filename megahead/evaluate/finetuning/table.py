"""A table that compares models: percentages, and training time."""

from __future__ import annotations

from collections.abc import Sequence

from megahead.evaluate.finetuning.results import FineTuningResult, Summary, summarise
from megahead.wording import duration


def comparison_table(results: Sequence[FineTuningResult]) -> list[dict[str, object]]:
    """A row for each metric of a task, a column for each model, and a last row of training time."""
    rows: dict[tuple[str, str, str], dict[str, object]] = {}
    for model in dict.fromkeys(result.model for result in results):
        mine = [result for result in results if result.model == model]
        halved = {result.task for result in mine if result.halved}
        for summary in summarise(mine):
            task = summary.task + (" (half of dev)" if summary.task in halved else "")
            test = "" if summary.test == summary.task.split("/")[-1] else summary.test
            names = {"task": task, "test": test, "metric": summary.metric}
            rows.setdefault((task, test, summary.metric), {**names})[model] = _cell(summary)
        time_row = rows.setdefault(("training", "", ""), {"task": "training"})
        time_row[model] = duration(sum(result.seconds() for result in mine))
    rows["training", "", ""] = rows.pop(("training", "", ""))
    return list(rows.values())


def _cell(summary: Summary) -> str:
    """Mean ± deviation (best epochs)."""
    deviation = summary.deviation()
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    epochs = f" ({' '.join(map(str, summary.epochs))})" if summary.epochs else ""
    return f"{100 * summary.mean():.1f}{spread}{epochs}"
