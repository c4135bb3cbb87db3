"""Experiments that are a grid of `grids.yaml` and its table: variants, negatives, precision."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from experiments.measures import Row, aggregate_seeds, tokens_per_second
from experiments.runner import GRIDS, ExperimentRunner, grid_charts


def compare_variants(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Scores each variant with its training-free head, and with one trained briefly together with the body."""
    rows: list[Row] = []
    for cell in runner.grid("variants", only):
        row = cell.row(GRIDS["variants"]["columns"])
        if cell.run.validation[-1]["head"] != "trained":
            overrides = [*runner.data(), f"init.from_checkpoint={runner.folder / cell.name}"]
            overrides += ["seed=1"] if "seed" in cell.values["run"] else []
            head = runner.train("small-head", f"{cell.name}-head", *overrides)
            row |= {f"trained head: {score}": head.validation[-1][score] for score in ("perplexity", "accuracy")}
        rows.append(row)
    runner.record("variants", rows)


def compare_negatives(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Varies the number of negatives at a constant batch size, and both together (group = batch), as in the paper."""
    rows = [cell.row(GRIDS["negatives"]["columns"]) for cell in runner.grid("negatives", only)]
    runner.record("negatives", rows, *grid_charts("negatives", rows))


def compare_precision(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Records every evaluation of each precision and seed, means over seeds, and gaps between held-out losses of pairs,
    on average and at the end."""
    names = ("step", "tokens", "loss", "perplexity")
    curves = [
        [
            cell.values | {"tokens/s": tokens_per_second(cell.run)} | {name: record[name] for name in names}
            for record in scored
        ]
        for cell in runner.grid("precision", only)
        if (scored := cell.run.validation)
    ]
    runner.record("precision", [row for curve in curves for row in curve])
    ends = [curve[-1] for curve in curves]
    runner.record("precision-ends", aggregate_seeds(ends, ("precision",), ("loss", "perplexity", "tokens/s")))
    gap_rows: list[Row] = []
    for one, other in combinations(curves, 2):
        gaps = [b["loss"] - a["loss"] for a, b in zip(one, other, strict=True)]
        runs = ", ".join(f"{curve[0]['precision']}, seed {curve[0]['seed']}" for curve in (one, other))
        differing = [name for name in ("precision", "seed") if one[0][name] != other[0][name]]
        mean = sum(map(abs, gaps)) / len(gaps)
        gap_rows.append(
            {"runs": runs, "differ in": " and ".join(differing), "mean apart": mean, "at the end": gaps[-1]}
        )
    runner.record("precision-apart", gap_rows)
