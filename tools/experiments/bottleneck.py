"""Who learns a language of facts through a narrow head? Headless against tied and untied softmax, 4k to 131k ids.

After Godey and Artzi, "the softmax head is a gradient bottleneck" (arXiv 2603.10145). The language: a fixed permutation
of the ids, whose cycles have 25 symbols. A text walks along one cycle for 124 symbols, so that it meets each about five
times; copying the last symbol never helps. From the second lap on a model can look the next symbol up in the text; in
the first lap only one that has learned the permutation knows it, and of that a model is told V facts.

Every run reads the same number of tokens; each objective has that of three learning rates with which it knows most
facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.charts import Chart
from experiments.laboratory import Laboratory, one_at_a_time
from experiments.measures import Row, lines, speed
from megahead.config.objective import HeadName
from megahead.data.writer import IndexedDatasetWriter
from megahead.evaluate.geometry import measure_geometry
from megahead.evaluate.perplexity import evaluate_checkpoint

SIZES = (4_096, 16_384, 65_536, 131_072)
LAP = 25
WALK = 5 * LAP - 1  # symbols of a text; its end token makes it a row
STEPS = 600
# Steps that an interruption may cost: a softmax over the largest vocabulary takes minutes for so many
CHECKPOINT_EVERY = 100
ROWS_A_STEP = 32
HELD_OUT = 512
OBJECTIVES = {
    "headless": ("objective.name=headless",),
    "tied softmax": ("objective.name=vanilla", "objective.tied=true"),
    "untied softmax": ("objective.name=vanilla", "objective.tied=false"),
}
HEADS: dict[str, HeadName] = {"headless": "pmi", "tied softmax": "tied", "untied softmax": "trained"}
RATES = (1e-3, 4e-3, 1.6e-2)
MODEL = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=2")


def compare_bottleneck(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains each objective in each size with every rate; `only`: sizes or objectives."""
    sizes = [size for size in SIZES if str(size) in only] or SIZES
    objectives = [name for name in OBJECTIVES if name in only] or list(OBJECTIVES)
    tried = [
        _trained(laboratory, size, objective, rate) for size in sizes for objective in objectives for rate in RATES
    ]
    laboratory.record("bottleneck-rates", tried)
    best = [
        max((row for row in tried if (row["ids"], row["objective"]) == (size, objective)), key=_knows)
        for size in sizes
        for objective in objectives
    ]
    known = Chart("Facts known", "ids", lines(best, "objective", "ids", "facts known"), True, from_zero=True)
    through = Chart("Gradient let through", "ids", lines(best, "objective", "ids", "gradient_share"), True)
    laboratory.record("bottleneck", best, known, through)


def _trained(laboratory: Laboratory, size: int, objective: str, rate: float) -> Row:
    """What a run knows at its end: of facts (the first lap), and with what it can look up (all laps)."""
    texts = write_language(laboratory.folder.parent / f"language-{size}", size)
    name = f"{objective}-{size}-{rate:g}".replace(" ", "-")
    run = laboratory.train("small-headless", name, *_settings(texts, size, rate), *OBJECTIVES[objective])
    folder = laboratory.folder / name
    first_lap = evaluate_checkpoint(folder, HEADS[objective], dataset=str(texts / "first-lap"))
    row = {"ids": size, "objective": objective, "rate": rate, "loss": first_lap.loss}
    row |= {
        "facts known": _without_ends(first_lap.accuracy, LAP - 1),
        "right in all laps": _without_ends(run.validation[-1]["accuracy"], WALK),
    }
    return row | asdict(measure_geometry(folder / f"checkpoints/step-{STEPS:08d}")) | {"tokens/s": speed(run)}


def _knows(row: Row) -> tuple[float, float]:
    """Greater for a run that knows more facts, or as many with a lower loss."""
    return row["facts known"], -row["loss"]


def _settings(texts: Path, size: int, rate: float) -> list[str]:
    data = {"train": texts / "text", "validation": texts / "held-out", "tokenizer": "null", "end_token": 0}
    data |= {"sequence_length": WALK + 1, "boundary_targets": "false"}
    training = dict.fromkeys(("steps", "evaluate_every"), STEPS) | {"checkpoint_every": CHECKPOINT_EVERY}
    return [
        *(f"data.{name}={value}" for name, value in data.items()),
        *(f"training.{name}={value}" for name, value in training.items()),
        *MODEL,
        f"model.vocab_size={size}",
        f"training.evaluate_samples={HELD_OUT}",
        f"batch.global_size={ROWS_A_STEP}",
        "batch.micro_size=16",
        f"optimizer.learning_rate={rate:g}",
        "engine.embedding=dense",
    ]


def _without_ends(accuracy: float, symbols: int) -> float:
    """Share of the right ones where the text goes on: where it ends, one target in `symbols`, nothing shows it."""
    return accuracy * symbols / (symbols - 1)


def write_language(folder: Path, size: int) -> Path:
    """Texts to learn from, others like them, and some of a first lap alone; written where they are missing."""
    symbols = 1 + np.random.default_rng(size).permutation(size - 1)
    cycles = symbols[: len(symbols) // LAP * LAP].reshape(-1, LAP)
    for part, (name, texts, length) in enumerate(
        (
            ("text", STEPS * ROWS_A_STEP + 1, WALK),
            ("held-out", HELD_OUT + 1, WALK),
            ("first-lap", 5 * HELD_OUT + 1, LAP - 1),
        )
    ):
        with one_at_a_time(folder / name):
            if not (folder / f"{name}.idx").exists():
                _write(folder / name, size, _walks(cycles, texts, length, np.random.default_rng([size, part])))
    return folder


def _walks(
    cycles: NDArray[np.int64], texts: int, length: int, chance: np.random.Generator
) -> Iterable[NDArray[np.int64]]:
    """Texts of `length` symbols along cycles, each from a place of its own, with the end token 0."""
    cycle, start = chance.integers(len(cycles), size=texts), chance.integers(LAP, size=texts)
    places = (start[:, None] + np.arange(length)) % LAP
    return np.pad(cycles[cycle[:, None], places], ((0, 0), (0, 1)))


def _write(prefix: Path, size: int, texts: Iterable[NDArray[np.int64]]) -> None:
    with IndexedDatasetWriter(prefix, vocab_size=size) as writer:
        for text in texts:
            writer.add_document(text)
