"""Who learns a language of facts through a narrow head? Headless against tied and untied softmax, 4k to 131k ids.

After Godey and Artzi, "the softmax head is a gradient bottleneck" (arXiv 2603.10145). The language: a fixed permutation
of the ids, whose cycles have 25 symbols. A text walks along one cycle for 124 symbols, so that it meets each about five
times; copying the last symbol never helps. From the second lap on a model can look the next symbol up in the text; in
the first lap only one that has learned the permutation knows it, and of that a model sees V facts.

Every run reads the same number of tokens; each objective has that of three learning rates with which it knows most
facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from experiments.measures import Row, speed
from experiments.runner import GRIDS, Cell, ExperimentRunner, course, settings_of
from megahead.config.objective import HeadName
from megahead.data.writer import IndexedDatasetWriter
from megahead.evaluate.geometry import measure_geometry
from megahead.evaluate.perplexity import evaluate_checkpoint
from steps.once import output_lock

LAP = 25
WALK = 5 * LAP - 1  # symbols of a text; its end token makes it a row
STEPS, ROWS_A_STEP = 600, 32
CHECKPOINT_EVERY = 100  # steps that an interruption may cost: a softmax over so many ids takes minutes for them
HELD_OUT = 512
HEADS: dict[str, HeadName] = {"headless": "pmi", "tied softmax": "tied", "untied softmax": "trained"}


def compare_bottleneck(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains each objective in each size with every rate; `only`: sizes or objectives."""
    axes = GRIDS["bottleneck"]["axes"]
    sizes = [size for size in axes["ids"]["values"] if str(size) in only] or axes["ids"]["values"]
    objectives = [name for name in axes["objective"] if name in only] or list(axes["objective"])
    tried: list[Row] = []
    for size in sizes:
        texts = write_language(runner.folder.parent / f"language-{size}", size)
        given = settings_of({"data.train": texts / "text", "data.validation": texts / "held-out"})
        given += course(STEPS, checkpoint_every=CHECKPOINT_EVERY, evaluate_samples=HELD_OUT)
        cells = runner.grid("bottleneck", (), *given, ids=[size], objective=objectives)
        tried += [_known(runner, texts, cell) for cell in cells]
    runner.record("bottleneck-rates", tried)
    best: list[Row] = []
    for size, objective in ((size, objective) for size in sizes for objective in objectives):
        same = [row for row in tried if (row["ids"], row["objective"]) == (size, objective)]
        best.append(max(same, key=lambda row: (row["facts known"], -row["loss"])))
    runner.record("bottleneck", best)


def _known(runner: ExperimentRunner, texts: Path, cell: Cell) -> Row:
    """What a run knows at its end: of facts (the first lap), and with what it can look up (all laps)."""
    folder = runner.folder / cell.name
    first_lap = evaluate_checkpoint(folder, HEADS[cell.values["objective"]], dataset=str(texts / "first-lap"))
    row = cell.values | {"loss": first_lap.loss, "facts known": _without_ends(first_lap.accuracy, LAP - 1)}
    row |= {"right in all laps": _without_ends(cell.run.validation[-1]["accuracy"], WALK)}
    return row | asdict(measure_geometry(folder)) | {"tokens/s": speed(cell.run)}


def _without_ends(accuracy: float, symbols: int) -> float:
    """Share of the right ones where the text goes on: where it ends, one target in `symbols`, nothing shows it."""
    return accuracy * symbols / (symbols - 1)


def write_language(folder: Path, size: int) -> Path:
    """Texts to learn from, others like them, and some of a first lap alone; written where they are missing. Each begins
    at a place of its own, and ends with the end token 0."""
    symbols = 1 + np.random.default_rng(size).permutation(size - 1)
    cycles = symbols[: len(symbols) // LAP * LAP].reshape(-1, LAP)
    for part, (name, texts, length) in enumerate(
        (("text", STEPS * ROWS_A_STEP, WALK), ("held-out", HELD_OUT, WALK), ("first-lap", 5 * HELD_OUT, LAP - 1))
    ):
        with output_lock(folder / name):
            if not (folder / f"{name}.idx").exists():
                chance = np.random.default_rng([size, part])
                cycle, start = chance.integers(len(cycles), size=texts + 1), chance.integers(LAP, size=texts + 1)
                places = (start[:, None] + np.arange(length)) % LAP
                with IndexedDatasetWriter(folder / name, vocab_size=size) as writer:
                    for walk in np.pad(cycles[cycle[:, None], places], ((0, 0), (0, 1))):
                        writer.add_document(walk)
    return folder
