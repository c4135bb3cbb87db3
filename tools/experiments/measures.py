"""What an experiment reads off its runs, and how their rows are put together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from rich.console import Console

from experiments.laboratory import Laboratory, ended, one_at_a_time
from megahead.evaluate.results import ResultsFile, TaskResult
from megahead.report.read import RunMetrics

Row = dict[str, Any]


def scores(run: RunMetrics, head: str) -> Row:
    """Held-out scores at the end, with the head that the run evaluates with."""
    last = run.validation[-1]
    return {f"{head} head: perplexity": last["perplexity"], f"{head} head: accuracy": last["accuracy"]}


def speed(run: RunMetrics) -> int:
    """Tokens a second of the median log line; where steps of a run's phases take differing times, over all of them."""
    switches = [event["step"] for event in run.events if event.get("session", {}).get("new_phase")]
    seconds, done, last = 0.0, 0, run.training[-1]
    for switch in sorted({*switches, last["step"]}):
        lines = [record for record in run.training if record["step"] <= switch and record["tokens"] > done]
        seconds += (lines[-1]["tokens"] - done) / float(median(record["tokens_per_second"] for record in lines))
        done = lines[-1]["tokens"]
    return round(done / seconds)


def cost(run: RunMetrics) -> float:
    """What a token costs, for ratios: the time `spent` on it."""
    return spent(run) / float(run.training[-1]["tokens"])


def spent(run: RunMetrics, until: int | None = None) -> float:
    """CPU seconds of rank 0 in the steps that the log has, or those `until` one, in which what else keeps the machine
    busy does not count; on a GPU seconds."""
    column, seconds, done = "step_seconds" if torch.cuda.is_available() else "step_cpu_seconds", 0.0, _began_at(run)
    for record in run.training:
        last = record["step"] if until is None else min(record["step"], until)
        seconds += float(record[column]) * max(0, last - done)
        done = record["step"]
    return seconds


def _began_at(run: RunMetrics) -> int:
    """The step of the checkpoint of another run that it went on from; 0 if there was none."""
    sessions = [event["step"] for event in run.events if "session" in event]
    return int(sessions[0]) if sessions else 0


def candidates(run: RunMetrics, steps: range | None = None) -> int | None:
    """Different ids that competed, on average over the run or some of its steps; None for a vanilla one."""
    lines = [record for record in run.training if steps is None or record["step"] - 1 in steps]
    counts = [record["candidates"] for record in lines if record.get("candidates")]
    return round(sum(counts) / len(counts)) if counts else None


def over_seeds(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> list[Row]:
    """One row for all that agree in `by`: how many they are, mean and standard deviation of each of `values`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [
        {**dict(zip(by, key, strict=True)), "seeds": len(group), **_spread(group, values)}
        for key, group in groups.items()
    ]


def _spread(rows: Sequence[Row], values: Sequence[str]) -> Row:
    spread: Row = {}
    for name in values:
        found = [row[name] for row in rows]
        spread |= {name: mean(found), f"± {name}": stdev(found) if len(found) > 1 else None}
    return spread


def percent(shares: Sequence[float]) -> str:
    """Mean ± standard deviation of several runs, as a cell."""
    spread = f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.1f}{spread}"


def lines(rows: Sequence[Row], name: str, across: str, up: str) -> dict[str, list[tuple[float, float]]]:
    """A chart's lines: for each value of the column `name` the points (`across`, `up`)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(str(row[name]), []).append((row[across], row[up]))
    return found


def relative_cost(
    laboratory: Laboratory, train: Callable[[Laboratory, str], RunMetrics], one: str, other: str
) -> float:
    """Of a token of `one`, where one of `other` costs 1; both are folders of the laboratory, which `train` trains for a
    few steps. A pair of which one was stopped begins anew: else the other would have gone on alone."""
    pair = [laboratory.folder / name for name in (one, other)]
    quiet = replace(laboratory, console=Console(quiet=True))
    with one_at_a_time(laboratory.folder / f"{one}-and-{other}"), ThreadPoolExecutor() as pool:
        if not all(ended(run) for run in pair):
            for run in pair:
                shutil.rmtree(run, ignore_errors=True)
        ours, theirs = pool.map(lambda name: train(quiet, name), (one, other))
    both = min(run.training[-1]["seconds"] for run in (ours, theirs))
    return _cost(ours, both) / _cost(theirs, both)


def _cost(run: RunMetrics, seconds: float) -> float:
    """Of a token in so many seconds of training, when both ran, without the first log line, where all begins."""
    first, *others = [record for record in run.training if record["seconds"] <= seconds] or [run.training[0]]
    if not others:
        return cost(run)
    last = others[-1]
    return (spent(run, last["step"]) - spent(run, first["step"])) / float(last["tokens"] - first["tokens"])


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
