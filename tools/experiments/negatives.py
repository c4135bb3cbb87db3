"""More negatives, or larger batches? (the paper's Fig. 8): groups of 1 to 64 rows in batches of 16 and 64 rows.

Every run reads the same tokens. In a column of the table the optimizer's batch is constant and the number of negatives
grows; along a diagonal (group = batch) both do, which is what the paper varied. The learning rate follows the root of
the batch, as is usual for Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, candidates, lines, scores

ROWS = 10_240
BATCHES: dict[int, tuple[int, ...]] = {64: (1, 4, 16, 64), 16: (1, 4, 16)}
LARGEST = 64
LEARNING_RATE = 3e-3
WARMUP = 0.1


def compare_negatives(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains a small decoder for each pair (or those of `only`, `batch-B-group-G`)."""
    data = laboratory.data()
    rows: list[Row] = []
    for batch, groups in BATCHES.items():
        for group in groups:
            name = f"batch-{batch}-group-{group}"
            if not only or name in only:
                run = laboratory.train("small-headless", name, *data, *_overrides(batch, group))
                rows.append({"batch": batch, "group": group, "candidates": candidates(run), **scores(run, "pmi")})
    laboratory.record("negatives", rows, *_charts(rows))


def _charts(rows: Sequence[Row]) -> list[Chart]:
    named = [{**row, "run": f"batches of {row['batch']} rows"} for row in rows]
    titles = {"pmi head: perplexity": "Held-out perplexity", "pmi head: accuracy": "Next token right"}
    return [
        Chart(title, "rows of a group", lines(named, "run", "group", column), log_across=True)
        for column, title in titles.items()
    ]


def _overrides(batch: int, group: int) -> list[str]:
    steps = ROWS // batch
    return [
        f"batch.global_size={batch}",
        f"objective.group_samples={group}",
        f"optimizer.learning_rate={LEARNING_RATE * sqrt(batch / LARGEST):g}",
        f"schedule.warmup_steps={max(1, round(WARMUP * steps))}",
        f"training.steps={steps}",
        f"training.evaluate_every={max(1, steps // 4)}",
        f"training.checkpoint_every={steps}",
    ]
