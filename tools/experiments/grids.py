"""Experiments that are a grid of `grids.yaml` and its table: variants, negatives, vocabularies, precision, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from experiments.measures import Row, over_seeds, speed
from experiments.recipe import FIRST
from experiments.runner import GRIDS, ExperimentRunner, charts_of, settings_of


def compare_variants(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Scores each with the head that its objective has without training, and with one trained briefly with the body."""
    rows: list[Row] = []
    for cell in runner.grid("variants", only):
        row = cell.row(GRIDS["variants"]["columns"])
        if cell.run.validation[-1]["head"] != "trained":
            given = [*runner.data(), f"init.from_checkpoint={runner.folder / cell.name}"]
            given += ["seed=1"] if "seed" in cell.values["run"] else []
            head = runner.train("small-head", f"{cell.name}-head", *given)
            row |= {f"trained head: {score}": head.validation[-1][score] for score in ("perplexity", "accuracy")}
        rows.append(row)
    runner.record("variants", rows)


def compare_negatives(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """In a column of the table the optimizer's batch is constant and the number of negatives grows; along a diagonal
    (group = batch) both do, which is what the paper varied."""
    rows = [cell.row(GRIDS["negatives"]["columns"]) for cell in runner.grid("negatives", only)]
    runner.record("negatives", rows, *charts_of("negatives", rows))


def compare_vocabularies(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """For each size a byte-level BPE is trained and the text tokenized; they are compared in bits per byte."""
    rows = [cell.row(GRIDS["vocabularies"]["columns"]) for cell in runner.grid("vocabularies", only)]
    for headless, vanilla in zip(rows[::2], rows[1::2], strict=True):
        headless["headless is faster"] = vanilla["headless is faster"] = headless["tokens/s"] / vanilla["tokens/s"]
    runner.record("vocabularies", rows, *charts_of("vocabularies", rows))


def compare_precision(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Every evaluation of each precision and seed; means over seeds; and how far apart held-out losses of two runs
    were, on average over their evaluations and at the end."""
    names = ("step", "tokens", "loss", "perplexity")
    curves = [
        [cell.values | {"tokens/s": speed(cell.run)} | {name: record[name] for name in names} for record in scored]
        for cell in runner.grid("precision", only)
        if (scored := cell.run.validation)
    ]
    runner.record("precision", [row for curve in curves for row in curve])
    ends = [curve[-1] for curve in curves]
    runner.record("precision-ends", over_seeds(ends, ("precision",), ("loss", "perplexity", "tokens/s")))
    apart: list[Row] = []
    for one, other in combinations(curves, 2):
        gaps = [b["loss"] - a["loss"] for a, b in zip(one, other, strict=True)]
        runs = ", ".join(f"{curve[0]['precision']}, seed {curve[0]['seed']}" for curve in (one, other))
        differ = [name for name in ("precision", "seed") if one[0][name] != other[0][name]]
        mean = sum(map(abs, gaps)) / len(gaps)
        apart.append({"runs": runs, "differ in": " and ".join(differ), "mean apart": mean, "at the end": gaps[-1]})
    runner.record("precision-apart", apart)


def compare_shapes(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Each shape learns at every learning rate with one seed, and at its best one with another."""
    rows: list[Row] = []
    columns, first = GRIDS["shapes"]["columns"], settings_of(FIRST)
    for shape in (shape for shape in GRIDS["shapes"]["axes"]["shape"] if not only or shape in only):
        swept = [cell.row(columns) for cell in runner.grid("shapes", (), *first, shape=[shape])]
        best = min(swept, key=lambda row: float(row["perplexity"]))["rate"]
        again = runner.grid("shapes", (), *first, shape=[shape], rate=[best], seed=[1])
        rows += swept + [cell.row(columns) for cell in again]
    runner.record("shapes", over_seeds(rows, ("shape", "rate"), [*columns]))
