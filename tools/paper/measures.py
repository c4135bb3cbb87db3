"""What an experiment reads off a run's log."""

from __future__ import annotations

from statistics import median
from typing import Any

from megahead.report import RunMetrics


def scores(run: RunMetrics, head: str) -> dict[str, Any]:
    """Held-out scores at the end, with the head that the run evaluates with."""
    last = run.validation[-1]
    return {f"{head} head: perplexity": last["perplexity"], f"{head} head: accuracy": last["accuracy"]}


def speed(run: RunMetrics) -> int:
    """Tokens a second of the median log line."""
    return round(median(record["tokens_per_second"] for record in run.training))


def candidates(run: RunMetrics) -> int | None:
    """Different ids that competed, on average over the run; None for a vanilla one."""
    counts = [record["candidates"] for record in run.training if record.get("candidates")]
    return round(sum(counts) / len(counts)) if counts else None
