"""Learning a language of facts through a narrow head: headless against tied and untied softmax, 4k to 131k ids.

After Godey and Artzi, "the softmax head is a gradient bottleneck" (arXiv 2603.10145). The language is a fixed
permutation of the ids with cycles of 25 symbols. A text follows one cycle for 124 symbols, about five laps; copying the
last symbol never helps. From the second lap on, a model can copy the next symbol from the text; in the first lap it has
to have learned the permutation, which has V facts.

Every run reads the same number of tokens; of three learning rates, the one that teaches an objective most facts counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

from experiments.measures import Row, tokens_per_second
from experiments.runner import GRIDS, Cell, ExperimentRunner, select_names, to_overrides, training_overrides
from megahead.config.objective import HeadName
from megahead.data.writer import IndexedDatasetWriter
from megahead.evaluate.geometry import measure_geometry
from megahead.evaluate.perplexity import evaluate_checkpoint
from steps.once import output_lock

CYCLE_LENGTH = 25
TEXT_LENGTH = 5 * CYCLE_LENGTH - 1  # symbols of a text; with its end token it fills a row
STEPS, ROWS_A_STEP = 600, 32
CHECKPOINT_EVERY = 100  # steps, which take minutes for a softmax over so many ids
HELD_OUT = 512
HEADS: dict[str, HeadName] = {"headless": "pmi", "tied softmax": "tied", "untied softmax": "trained"}


def compare_bottleneck(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains each objective in each size with every rate; `only`: sizes or objectives."""
    axes, rows = GRIDS["bottleneck"]["axes"], list[Row]()
    sizes, objectives = select_names(only, axes["ids"]["values"], axes["objective"])
    for size in sizes:
        texts = write_language(runner.folder.parent / f"language-{size}", size)
        overrides = to_overrides({"data.train": texts / "text", "data.validation": texts / "held-out"})
        overrides += training_overrides(STEPS, checkpoint_every=CHECKPOINT_EVERY, evaluate_samples=HELD_OUT)
        cells = runner.grid("bottleneck", (), *overrides, ids=[size], objective=objectives)
        rows += [_evaluate(runner, texts, cell) for cell in cells]
    runner.record("bottleneck-rates", rows)
    best: dict[tuple[int, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["facts known"], -row["loss"])):
        best[row["ids"], row["objective"]] = row
    runner.record("bottleneck", [best[point] for point in product(sizes, objectives)])


def _evaluate(runner: ExperimentRunner, texts: Path, cell: Cell) -> Row:
    """Final accuracy of a run: on facts (the first lap), and on all laps."""
    folder = runner.folder / cell.name
    first_lap = evaluate_checkpoint(folder, HEADS[cell.values["objective"]], dataset=str(texts / "first-lap"))
    row = cell.values | {"loss": first_lap.loss, "facts known": _symbol_accuracy(first_lap.accuracy, CYCLE_LENGTH - 1)}
    row |= {"right in all laps": _symbol_accuracy(cell.run.validation[-1]["accuracy"], TEXT_LENGTH)}
    return row | asdict(measure_geometry(folder)) | {"tokens/s": tokens_per_second(cell.run)}


def _symbol_accuracy(accuracy: float, symbols: int) -> float:
    """Accuracy without the unpredictable end tokens, which are one target in `symbols`."""
    return accuracy * symbols / (symbols - 1)


def write_language(folder: Path, size: int) -> Path:
    """Writes training texts, held-out texts, and held-out first laps, unless they exist.

    Each starts at a random position of a random cycle, and ends with the end token 0."""
    symbols = 1 + np.random.default_rng(size).permutation(size - 1)
    cycles = symbols[: len(symbols) // CYCLE_LENGTH * CYCLE_LENGTH].reshape(-1, CYCLE_LENGTH)
    for split, (name, texts, length) in enumerate(
        (
            ("text", STEPS * ROWS_A_STEP, TEXT_LENGTH),
            ("held-out", HELD_OUT, TEXT_LENGTH),
            ("first-lap", 5 * HELD_OUT, CYCLE_LENGTH - 1),
        )
    ):
        with output_lock(folder / name):
            if not (folder / f"{name}.idx").exists():
                generator = np.random.default_rng([size, split])
                cycle = generator.integers(len(cycles), size=texts + 1)
                start = generator.integers(CYCLE_LENGTH, size=texts + 1)
                positions = (start[:, None] + np.arange(length)) % CYCLE_LENGTH
                with IndexedDatasetWriter(folder / name, vocab_size=size) as writer:
                    for document in np.pad(cycles[cycle[:, None], positions], ((0, 0), (0, 1))):
                        writer.add_document(document)
    return folder
