"""Time and memory of a training step against the batch, headless and vanilla (the paper's Fig. 3).

BERT-base of 512 tokens a row, 15 % masked, as in the paper; and rows of 128. Both objectives take their steps in turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines

SHAPES = (("bert-small", 128), ("bert-small", 512), ("bert-base", 128), ("bert-base", 512))
TOKENS = {"bert-small": (512, 1_024, 2_048, 4_096), "bert-base": (512, 1_024, 2_048)}
STEPS = "3"


def compare_latency(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Times every shape (or those of `only`, `bert-base-512`) in micro-batches of so many tokens. Needs no text."""
    rows: list[Row] = []
    for size, length in SHAPES:
        shape = f"{size}-{length}"
        if not only or shape in only:
            mine = [
                row for tokens in TOKENS[size] if tokens >= length for row in _timed(laboratory, size, length, tokens)
            ]
            laboratory.record(shape, mine, *_charts(mine))
            rows += [{"shape": shape, **row} for row in mine]
    laboratory.record("latency", rows)


def _timed(laboratory: Laboratory, size: str, length: int, tokens: int) -> list[Row]:
    """A row for each objective; one that is slower than headless says how many times."""
    batch, output = tokens // length, laboratory.folder / f"{size}-{length}-{tokens}.json"
    if not output.exists():
        what = ["--preset", size, "--micro-batch", str(batch), "--sequence-length", str(length), "--steps", STEPS]
        laboratory.run("bench_step.py", *what, "--threads", "1", "--output", str(output))
    timed = json.loads(output.read_text())
    columns = ("objective", "ms", "tokens/s", "peak MB")
    return [
        {"batch": batch, **{name: row[name] for name in columns}, "times headless": row["ms"] / timed[0]["ms"]}
        for row in timed
    ]


def _charts(rows: Sequence[Row]) -> list[Chart]:
    titles = {"ms": "Milliseconds a step", "peak MB": "Peak memory, MB"}
    return [
        Chart(title, "rows of the micro-batch", lines(rows, "objective", "batch", column), True, from_zero=True)
        for column, title in titles.items()
    ]
