"""Small encoders on GLUE and SuperGLUE (the paper's Tables 1, 2, 12), on XNLI (Table 5, Fig. 6); variants on GLUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from experiments.measures import Chart, Row, candidates, lines, percent, speed
from experiments.neighbours import PLAIN, settings_of_variant
from experiments.runner import GRIDS, ExperimentRunner
from megahead.config.loading import config_from_dict
from megahead.config.plan import phases_of
from megahead.data.indexed import IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.estimate import run_flops
from megahead.evaluate.finetuning import FineTuningResult, comparison_table
from megahead.report.read import RunMetrics
from steps.once import output_lock

WRONG = 0.1
FINE_TUNING = ["--max-train-rows", "3000", "--epochs", "3", "--learning-rate", "3e-4"]
LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "zh")  # the paper's
STEPS, PROBE_STEPS = 2000, 20  # of glue's plain encoder, and of runs that measure what a step of a variant costs
SEEDS = 3  # of glue's fine-tuning


def compare_encoders(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains all runs (or those of `only`); fine-tunes them where --tasks-data is given, with balanced and with regular
    cross-entropy, beside the same shape with random weights.

    `wrong-labels` learns from a text a tenth of whose tokens were replaced at random before anything was masked, inputs
    and labels, as in the published code's vanilla runs; `headless-noise` and `vanilla-noise` read a tenth of their
    inputs so, with clean labels, as its headless runs did.
    """
    data = runner.data(encoder=True)
    prefix, rows = Path(data[0].removeprefix("data.train=")), []
    runs = {name: own for name, own in GRIDS["encoders"]["axes"]["run"].items() if not only or name in only}
    for name, own in runs.items():
        config = f"encoder-small-{'headless' if name.startswith('headless') else 'vanilla'}"
        given = [f"data.train={_with_wrong_tokens(prefix)}"] if name == "wrong-labels" else own
        rows.append(_end(name, runner.train(config, name, *data, *given)))
    runner.record("encoders", rows)
    if runner.tasks_data is not None:
        tasks = ["--task", "glue", "superglue", "--data", str(runner.tasks_data), "--floor", *FINE_TUNING]
        for loss, seeds in (("balanced", "2"), ("regular", "1")):
            results = runner.fine_tune(f"glue-{loss}", [*runs], *tasks, "--loss", loss, "--seeds", seeds)
            runner.record(f"encoders-{loss}", table_of(results))


def _end(name: str, run: RunMetrics) -> Row:
    """Held-out scores at the end, with the head that the run evaluates with."""
    last = run.validation[-1]
    scores = {f"{last['head']} head: {score}": last[score] for score in ("perplexity", "accuracy")}
    return {"run": name, **scores, "tokens/s": speed(run)}


def table_of(results: Sequence[FineTuningResult]) -> list[Row]:
    """A row for each task, a column for each run."""
    return [{Path(name).name: cell for name, cell in row.items()} for row in comparison_table(results)]


def _with_wrong_tokens(prefix: Path) -> Path:
    """A copy of the dataset in which one token in ten is any other, but for ends of documents; made where missing."""
    made = prefix.with_name(f"{prefix.name}-wrong")
    with output_lock(made):
        if not made.with_suffix(".idx").exists():
            dataset, generator = IndexedDataset(prefix), np.random.default_rng(0)
            size = json.loads(prefix.with_suffix(".json").read_text())["vocab_size"]
            with IndexedDatasetWriter(made, vocab_size=size) as writer:
                for tokens in (dataset[i] for i in range(len(dataset))):
                    wrong = generator.random(len(tokens)) < WRONG
                    wrong[-1] = False
                    writer.add_document(np.where(wrong, generator.integers(0, size, len(tokens)), tokens))
    return made


def compare_multilingual(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains headless and vanilla (or those of `only`) on the folder of datasets, one a language, that docs/encoders.md
    makes; `--set data.tokenizer=F` names their tokenizer.

    Where --tasks-data is given both are fine-tuned in seven languages, each on half of XNLI's dev set, and tested on
    the other half, beside the same shape with random weights: in the language trained on, and, trained on English
    alone, in all.
    """
    folder = runner.given_text()
    parts = sorted(path.with_suffix("") for path in folder.glob("*.idx") if not path.stem.endswith("validation"))
    train = ",".join(f"{{prefix: {part}}}" for part in parts)
    data = [f"data.train=[{train}]", f"data.validation={folder / 'validation'}"]
    cells = runner.grid("multilingual", only, *data)
    along = [{**record, "run": cell.name} for cell in cells for record in cell.run.validation]
    curves = lines(along, "run", "tokens", "perplexity")
    chart = Chart("Held-out perplexity of masked tokens", "tokens", curves, log_up=True)
    runner.record("multilingual", [_end(cell.name, cell.run) for cell in cells], chart)
    if runner.tasks_data is not None:
        tasks = ["--task", *(f"xnli/{one}" for one in LANGUAGES), "--languages", ",".join(LANGUAGES), "--floor"]
        tasks += ["--data", str(runner.tasks_data), "--epochs", "3", "--learning-rate", "3e-4"]
        tasks += ["--batch-size", "32", "--seeds", "1"]
        results = runner.fine_tune("xnli-seeds", [cell.name for cell in cells], *tasks)
        runner.record("xnli", [_of_model(model, results) for model in dict.fromkeys(one.model for one in results)])


def _of_model(model: str, results: Sequence[FineTuningResult]) -> Row:
    """Accuracies of a model, means over languages for each seed: its table cells."""
    mine = [result for result in results if result.model == model]
    english: list[float] = []
    target: list[float] = []
    for seed in sorted({result.seed for result in mine}):
        reached = {one.task.removeprefix("xnli/"): one.scores() for one in mine if one.seed == seed}
        english.append(mean(found["accuracy"] for found in reached["en"].values()))
        target.append(mean(reached[language][language]["accuracy"] for language in reached))
    row: Row = {"model": Path(model).name, "English only": percent(english), "target language": percent(target)}
    for language in LANGUAGES:
        row[language] = percent([one.scores()[language]["accuracy"] for one in mine if one.task == f"xnli/{language}"])
    return row


def compare_glue(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains variants of `neighbours` (or those of `only`) for as many operations each, and fine-tunes them where
    --tasks-data is given.

    Held-out perplexity is of each one's own masks, and of replaced tokens the generator's, so that fine-tuning alone
    compares them.
    """
    names = [name for name in GRIDS["glue"] if not only or name in only]
    budget, rows = STEPS * _a_step(runner, PLAIN), []
    for name in names:
        run = _train(runner, name, name, round(budget / _a_step(runner, name)))
        last, trained = run.validation[-1], run.training[-1]
        row = {"run": name, "tokens": trained["tokens"], "PFLOP": operations(runner, run) / 1e15}
        row |= {"seconds": trained["seconds"], "tokens/s": speed(run), "perplexity": last["perplexity"]}
        detected = last.get("detection") or {}
        rows.append(row | {"found": detected.get("found"), "kept": detected.get("kept")})
    runner.record("glue-runs", rows)
    if runner.tasks_data is not None:
        results = [result for name in names for result in fine_tuned(runner, name, runner.tasks_data)]
        runner.record("glue", table_of(results))


def _a_step(runner: ExperimentRunner, name: str) -> float:
    """Operations of a variant's step, on average over its phases."""
    return operations(runner, _train(runner, name, f"probe-{name}", PROBE_STEPS)) / PROBE_STEPS


def operations(runner: ExperimentRunner, run: RunMetrics) -> float:
    """Of a whole run: those of each phase, by the candidates that it had."""
    config = config_from_dict(runner.runs[run.name]["config"])
    tokens = config.batch.global_size * config.data.sequence_length
    total = 0.0
    for phase in phases_of(config):
        rows = candidates(run, phase.steps) or config.model.padded_vocab_size()
        total += len(phase.steps) * tokens * run_flops(phase.config, rows).total
    return total


def _train(runner: ExperimentRunner, name: str, folder: str, steps: int) -> RunMetrics:
    config, settings = settings_of_variant(*GRIDS["glue"][name])
    course = [f"training.steps={steps}", f"schedule.warmup_steps={max(1, steps // 10)}"]
    if folder != name:
        course.append("training.log_seconds=0")
    return runner.train(config, folder, *runner.data(encoder=True), *settings, *course)


def fine_tuned(runner: ExperimentRunner, name: str, data: Path, rows: str | None = None) -> list[FineTuningResult]:
    """On GLUE, with SEEDS; `rows` of each task to learn from, or as many as FINE_TUNING says. Results are kept for each
    model in a file of its own, so that commands with other models can run beside."""
    tasks = ["--task", "glue", "--data", str(data), "--loss", "balanced", "--seeds", str(SEEDS), *FINE_TUNING]
    return runner.fine_tune(f"glue-{name}", [name], *tasks, *([] if rows is None else ["--max-train-rows", rows]))
