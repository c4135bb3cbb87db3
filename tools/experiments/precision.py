"""Is a model trained in bf16 as good as in fp32? The demo's model with both, and with two seeds of each.

What separates the two precisions of one seed is to be held against what separates two seeds of one precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, over_seeds, speed

PRECISIONS = ("fp32", "bf16")
SEEDS = (0, 1)
VOCABULARY = 16_384  # the demo's


def compare_precision(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains each precision with every seed; `only`: seeds."""
    seeds = [seed for seed in SEEDS if not only or str(seed) in only]
    runs = [(precision, seed) for seed in seeds for precision in PRECISIONS]
    along = [row for precision, seed in runs for row in _along(laboratory, precision, seed)]
    chart = Chart("Held-out perplexity", "tokens", lines(_named(along), "run", "tokens", "perplexity"), log_up=True)
    laboratory.record("precision", along, chart)
    last = max(row["step"] for row in along)
    ends = [row for row in along if row["step"] == last]
    laboratory.record("precision-ends", over_seeds(ends, ("precision",), ("loss", "perplexity", "tokens/s")))
    laboratory.record("precision-apart", [_apart(along, *pair) for pair in combinations(runs, 2)])


def _along(laboratory: Laboratory, precision: str, seed: int) -> list[Row]:
    """Every evaluation of a run."""
    given = [*laboratory.data(VOCABULARY), f"engine.precision={precision}", f"seed={seed}"]
    run = laboratory.train("demo-headless", f"{precision}-{seed}", *given)
    about = {"precision": precision, "seed": seed, "tokens/s": speed(run)}
    names = ("step", "tokens", "loss", "perplexity")
    return [about | {name: record[name] for name in names} for record in run.validation]


def _apart(rows: Sequence[Row], one: tuple[str, int], other: tuple[str, int]) -> Row:
    """How far apart the held-out losses (nats) of two runs were: on average over their evaluations, and at the end."""
    losses = [[row["loss"] for row in rows if (row["precision"], row["seed"]) == run] for run in (one, other)]
    gaps = [b - a for a, b in zip(*losses, strict=True)]
    differ = [name for name, a, b in zip(("precision", "seed"), one, other, strict=True) if a != b]
    pair = {"runs": f"{_name(*one)}, {_name(*other)}", "differ in": " and ".join(differ)}
    return pair | {"mean apart": sum(abs(gap) for gap in gaps) / len(gaps), "at the end": gaps[-1]}


def _named(rows: Sequence[Row]) -> list[Row]:
    return [row | {"run": _name(row["precision"], row["seed"])} for row in rows]


def _name(precision: str, seed: int) -> str:
    return f"{precision}, seed {seed}"
