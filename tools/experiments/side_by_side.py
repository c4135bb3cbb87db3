"""What a step of one run costs beside one of another, measured while both run, so that what else keeps the machine busy
slows both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rich.console import Console

from experiments.laboratory import Laboratory, ended
from experiments.measures import cost, spent
from experiments.one_at_a_time import one_at_a_time
from megahead.report.read import RunMetrics


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
