"""Models on the harness's tasks, as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.laboratory import Laboratory
from experiments.measures import Row
from megahead.evaluate.results import ResultsFile, TaskResult

Scored = Mapping[Path, Sequence[TaskResult]]


def score(
    laboratory: Laboratory,
    name: str,
    tasks: str,
    limit: int | None,
    data: Path,
    models: Sequence[Path],
    cloze: Path | None = None,
) -> Scored:
    """What each model reaches on the first `limit` examples, or on all; `folder`/NAME.json keeps it. `cloze`: the
    passages of that task."""
    output = laboratory.folder / f"{name}.json"
    what = ["--tasks", tasks, "--data", str(data), "--output", str(output)]
    what += [] if limit is None else ["--limit", str(limit)]
    what += [] if cloze is None else ["--cloze", str(cloze)]
    laboratory.run("eval_harness.py", *what, "--model", *map(str, models))
    kept = ResultsFile(output)
    return {model: kept.of(model, limit) for model in models}


def scores_of(result: TaskResult) -> Row:
    """Metric to value, and `± METRIC` to its standard error."""
    values = {score.metric: score.value for score in result.scores}
    return values | {f"± {score.metric}": score.stderr for score in result.scores}


def beside(scored: Scored) -> list[Row]:
    """A row for each metric of a task, a column for each model."""
    rows: dict[tuple[str, str], Row] = {}
    for model, results in scored.items():
        for result in results:
            for score in result.scores:
                row = rows.setdefault((result.task, score.metric), {"task": result.task, "metric": score.metric})
                row[model.name] = f"{score.value:.4g} ± {score.stderr:.2g}"
    return list(rows.values())
