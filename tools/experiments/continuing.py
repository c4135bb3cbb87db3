"""Training continued in another vocabulary: a headless decoder and, for equal CPU time, vanilla models of families with
large vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from experiments.measures import Chart, Row, group_points, time_spent, tokens_per_second
from experiments.runner import GRIDS, ExperimentRunner, run_name, select_names, training_overrides
from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import UserError
from megahead.report.read import RunMetrics

ALL_SAMPLES = 1_000_000  # an evaluation reads all of the held-out text, the same bytes in every vocabulary

DECODER_IDS = 32_768  # ids that the decoder changes to, from 8,192
FIRST_STEPS, STEPS_AFTER, EVALUATE_EVERY = 320, 160, 10
DECODER_HELD_OUT = 500  # one in so many documents, few enough to evaluate on all

IDS_BEFORE, IDS_AFTER = 8_192, 119_547  # of the vanilla models, before and after; the second is multilingual BERT's
BASE_STEPS = 200
MINUTES = 4.0  # of CPU, of each continuation, unless --minutes says otherwise
HELD_OUT = 200  # one in so many documents


def compare_revocabulary(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Measures the tokens and minutes until a decoder recovers its bits per byte in a new vocabulary, for each way of
    training in the grid (or those of `only`).

    A headless decoder is trained with 8,192 ids. Then it changes to a larger vocabulary of the same text, and to that
    of --tokenizer, if given; a new token's embedding is initialized by the mean of those of the old tokens that spell
    it. Evaluations read all of the held-out text, so that bits per byte are of the same bytes in every vocabulary.
    """
    select_names(only, GRIDS["revocabulary"]["axes"]["way"])
    runs = replace(runner, folder=runner.folder / "runs", held_out=DECODER_HELD_OUT)
    last = training_overrides(FIRST_STEPS, evaluate_samples=ALL_SAMPLES)
    base = runs.train("small-headless", "base", *runs.data(), *last)
    goal = base.validation[-1]["bits_per_byte"]
    texts = {f"{DECODER_IDS:,} ids": runs.data(DECODER_IDS)}
    if runs.tokenizer is not None:
        texts[runs.tokenizer.stem] = runs.data_with_tokenizer(runs.tokenizer)
    rows: list[Row] = []
    charts: list[Chart] = []
    for name, text in texts.items():
        ids = load_tokenizer(Path(_value(text, "data.tokenizer"))).vocab_size
        overrides = [*text, f"model.vocab_size={ids}", _convert(runs, "base", f"moved-{name}", text)]
        overrides += training_overrides(STEPS_AFTER, evaluate_every=EVALUATE_EVERY, evaluate_samples=ALL_SAMPLES)
        cells = runs.grid("revocabulary", only, *overrides, vocabulary=[name])
        rows += [cell.values | _recovery_row(cell.run, goal) for cell in cells]
        records = [{**record, **cell.values} for cell in cells for record in cell.run.validation]
        before = {"before": [(record["tokens"], goal) for record in records]}
        charts.append(Chart(name, "tokens", group_points(records, "way", "tokens", "bits_per_byte") | before))
    runner.record("revocabulary", rows, *charts)


def _recovery_row(run: RunMetrics, goal: float) -> Row:
    """Tokens and minutes (at median speed) until an evaluation is as good as `goal`; first and last scores; speed."""
    first = next(record for record in run.validation if record["step"])
    recovered_tokens = next((record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal), None)
    return {
        "tokens until back": recovered_tokens,
        "minutes until back": None if recovered_tokens is None else recovered_tokens / tokens_per_second(run) / 60,
        f"bits per byte after {first['step']} steps": first["bits_per_byte"],
        "at the end": run.validation[-1]["bits_per_byte"],
        "tokens/s": tokens_per_second(run),
    }


def compare_continuing(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains a small vanilla model of each shape (or those of `only`), gives it another vocabulary, and continues it
    headless and with a softmax for equal times; short runs measure the steps that fit."""
    runs = replace(runner, folder=runner.folder / "runs", held_out=HELD_OUT)
    rows, grid = list[Row](), GRIDS["continuing"]
    (shapes,) = select_names(only, grid["shapes"])
    for shape in shapes:
        options = grid["shapes"][shape]
        old, new = (runs.data(size, encoder=options["is_encoder"]) for size in (IDS_BEFORE, IDS_AFTER))
        config, settings = options["config"], options["settings"]
        last = training_overrides(BASE_STEPS, evaluate_samples=ALL_SAMPLES)
        base = runs.train(config, f"{shape}-base", *old, *settings, *grid["ways"]["softmax"], *last)
        rows.append({"model": shape, "trained": "before"} | _scores(base, old))
        converted = _convert(runs, f"{shape}-base", f"{shape}-base-converted", new)
        start = [*new, *settings, converted, "init.mode=continue"]
        for way, overrides in grid["ways"].items():
            settings, name = [*start, *overrides], f"{shape}-{way}"
            steps = runs.steps_within(runs.minutes or MINUTES, config, name, *settings)
            run = runs.train(config, name, *settings, *training_overrides(steps, evaluate_samples=ALL_SAMPLES))
            rows.append({"model": shape, "trained": way} | _scores(run, new))
    runner.record("continuing", rows)


def _scores(run: RunMetrics, data: Sequence[str]) -> Row:
    """Steps, tokens, minutes of training and the last evaluation. An encoder's bits per byte are those of its masked
    tokens, at the held-out text's tokens per byte."""
    info = IndexedDataset(_value(data, "data.validation")).info
    last, training = run.validation[-1], run.training[-1]
    if info is None:
        raise UserError("the held-out text must have its PREFIX.json, but has none.")
    tokens_per_byte = (info.tokens - info.documents) / info.text_bytes
    bits = last["bits_per_byte"] or last["loss"] / log(2) * tokens_per_byte
    row: dict[str, Any] = {"steps": training["step"], "tokens": training["tokens"]}
    return row | {"minutes": time_spent(run) / 60, "bits per byte": bits, "accuracy": last["accuracy"]}


def _convert(runner: ExperimentRunner, base: str, name: str, data: Sequence[str]) -> str:
    """Converts run `base` to the vocabulary of `data`, once; returns the override to start there."""
    tokenizer, converted = Path(_value(data, "data.tokenizer")), runner.folder / run_name(name)
    runner.make(converted, "convert.py", "revocabulary", "--model", runner.folder / base, "--tokenizer", tokenizer)
    return f"init.from_checkpoint={converted}"


def _value(overrides: Sequence[str], key: str) -> str:
    return next(one.partition("=")[2] for one in overrides if one.startswith(f"{key}="))
