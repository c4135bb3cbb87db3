"""A small encoder, headless and vanilla, on GLUE and SuperGLUE (the paper's Tables 1, 2 and 12).

The vanilla twin has clean labels; a third run learns from a text a tenth of whose tokens were replaced at random before
anything was masked, inputs and labels, as in the published code's vanilla runs. `headless-noise` and `vanilla-noise`
read a tenth of their inputs so, with clean labels, as the published code's headless runs did.
All are fine-tuned with balanced and with regular cross-entropy, beside the same shape with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.laboratory import Laboratory, one_at_a_time
from experiments.measures import Row, scores, speed
from megahead.data.indexed import IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.evaluate.finetuning import FineTuningResults, comparison_table

WRONG = 0.1
NOISE = f"masking.noise_share={WRONG}"
RUNS = ("headless", "vanilla", "wrong-labels", "headless-noise", "vanilla-noise")
SEEDS = {"balanced": "2", "regular": "1"}
FINE_TUNING = ["--max-train-rows", "3000", "--epochs", "3", "--learning-rate", "3e-4"]


def compare_encoders(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains RUNS (or those of `only`); fine-tunes them where --tasks-data is given."""
    data = laboratory.encoder_data()
    prefix = Path(data[0].removeprefix("data.train="))
    names = [name for name in RUNS if not only or name in only]
    rows: list[Row] = []
    for name in names:
        config = f"encoder-small-{'headless' if name.startswith('headless') else 'vanilla'}"
        given = [f"data.train={_with_wrong_tokens(prefix)}"] if name == "wrong-labels" else []
        run = laboratory.train(config, name, *data, *given, *([NOISE] if name.endswith("-noise") else []))
        rows.append({"run": name, **scores(run, run.validation[-1]["head"]), "tokens/s": speed(run)})
    laboratory.record("encoders", rows)
    if laboratory.tasks_data is not None:
        for loss in SEEDS:
            _fine_tune(laboratory, names, loss, laboratory.tasks_data)


def _fine_tune(laboratory: Laboratory, names: Sequence[str], loss: str, data: Path) -> None:
    models = [str(laboratory.folder / name) for name in names]
    output = laboratory.folder / f"glue-{loss}.json"
    tasks = ["--task", "glue", "superglue", "--data", str(data), "--floor", "--loss", loss]
    laboratory.run(
        "finetune.py", "--model", *models, *tasks, *FINE_TUNING, "--seeds", SEEDS[loss], "--output", str(output)
    )
    rows = comparison_table(FineTuningResults(output).newest())
    laboratory.record(f"encoders-{loss}", [{Path(name).name: cell for name, cell in row.items()} for row in rows])


def _with_wrong_tokens(prefix: Path) -> Path:
    """A copy of the dataset in which one token in ten is any other; made where it is missing."""
    made = prefix.with_name(f"{prefix.name}-wrong")
    with one_at_a_time(made):
        if not made.with_suffix(".idx").exists():
            _write_with_wrong_tokens(prefix, made)
    return made


def _write_with_wrong_tokens(prefix: Path, made: Path) -> None:
    dataset, generator = IndexedDataset(prefix), np.random.default_rng(0)
    info = json.loads(prefix.with_suffix(".json").read_text())
    with IndexedDatasetWriter(made, vocab_size=info["vocab_size"]) as writer:
        for tokens in (dataset[i] for i in range(len(dataset))):
            wrong = generator.random(len(tokens)) < WRONG
            wrong[-1] = False  # the end of the document
            writer.add_document(np.where(wrong, generator.integers(0, info["vocab_size"], len(tokens)), tokens))
