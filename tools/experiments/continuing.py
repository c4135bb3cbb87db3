"""Vanilla models of large-vocabulary families, continued in a larger vocabulary, headless and with a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from experiments.measures import Row, time_spent
from experiments.runner import GRIDS, ExperimentRunner, to_overrides, training_overrides
from megahead.data.indexed import IndexedDataset
from megahead.errors import UserError
from megahead.report.read import RunMetrics

SMALLER, LARGER = 8_192, 119_547  # as many ids as multilingual BERT's tokenizer
BASE_STEPS = 200
MINUTES = 4.0  # of CPU, of each continuation, unless --minutes says otherwise
HELD_OUT = 200  # one in so many documents
ALL_SAMPLES = 1_000_000  # an evaluation reads all of the held-out text, the same bytes in every vocabulary


def compare_continuing(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains a small vanilla model of each shape (or those of `only`), gives it another vocabulary, and continues it
    headless and with a softmax for equal times, of which short runs measure the steps."""
    runs = replace(runner, folder=runner.folder / "runs", held_out=HELD_OUT)
    rows, grid = list[Row](), GRIDS["continuing"]
    for shape, options in grid["shapes"].items():
        if only and shape not in only:
            continue
        old, new = (runs.data(size, encoder=options["is_encoder"]) for size in (SMALLER, LARGER))
        config, settings = options["config"], options["settings"]
        last = training_overrides(BASE_STEPS, evaluate_samples=ALL_SAMPLES)
        base = runs.train(config, f"{shape}-base", *old, *settings, *grid["ways"]["softmax"], *last)
        rows.append({"model": shape, "trained": "before"} | _scores(base, old))
        start = [*new, *settings, *_convert(runs, f"{shape}-base", new)]
        for way, overrides in grid["ways"].items():
            settings, name = [*start, *overrides], f"{shape}-{way}"
            steps = runs.steps_within(runs.minutes or MINUTES, config, name, *settings)
            run = runs.train(config, name, *settings, *training_overrides(steps, evaluate_samples=ALL_SAMPLES))
            rows.append({"model": shape, "trained": way} | _scores(run, new))
    runner.record("continuing", rows)


def _convert(runner: ExperimentRunner, base: str, data: Sequence[str]) -> list[str]:
    """Overrides that start from the run `base`, converted to the vocabulary of `data`."""
    tokenizer = Path(_value(data, "data.tokenizer"))
    converted = runner.folder / f"{base}-converted"
    runner.make(converted, "convert.py", "revocabulary", "--model", runner.folder / base, "--tokenizer", tokenizer)
    return to_overrides({"init.from_checkpoint": converted, "init.mode": "continue"})


def _scores(run: RunMetrics, data: Sequence[str]) -> Row:
    """Steps, tokens, minutes of training and the last evaluation. Bits per byte of an encoder are those of its masked
    tokens, by the bytes of a token of the held-out text."""
    info = IndexedDataset(_value(data, "data.validation")).info
    last, training = run.validation[-1], run.training[-1]
    if info is None:
        raise UserError("the held-out text must have its PREFIX.json, but has none.")
    tokens_per_byte = (info.tokens - info.documents) / info.text_bytes
    bits = last["bits_per_byte"] or last["loss"] / log(2) * tokens_per_byte
    row: dict[str, Any] = {"steps": training["step"], "tokens": training["tokens"]}
    return row | {"minutes": time_spent(run) / 60, "bits per byte": bits, "accuracy": last["accuracy"]}


def _value(overrides: Sequence[str], key: str) -> str:
    return next(one.partition("=")[2] for one in overrides if one.startswith(f"{key}="))
