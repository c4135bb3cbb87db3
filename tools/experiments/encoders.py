"""Small encoders on GLUE and SuperGLUE (the paper's Tables 1, 2, 12), on XNLI (Table 5, Fig. 6), in vocabularies of
several sizes (Fig. 7); variants on GLUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from experiments.measures import Chart, Row, aggregate_seeds, mean_candidates, percent, tokens_per_second
from experiments.neighbours import PLAIN, settings_of_variant
from experiments.runner import GRIDS, ExperimentRunner, grid_charts, select_names
from megahead.config.loading import config_from_dict
from megahead.config.plan import phases_of
from megahead.data.indexed import IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.estimate import run_flops
from megahead.evaluate.finetuning_comparison import FineTuningResult, comparison_table, summarize
from megahead.report.read import RunMetrics
from steps.once import output_lock

CORRUPTED_SHARE = 0.1
FINE_TUNING = ["--max-train-rows", "3000", "--epochs", "3", "--learning-rate", "3e-4"]
LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "zh")  # the paper's
STEPS, PROBE_STEPS = 2000, 20  # of glue's plain encoder, and of runs that measure a variant's cost per step
SEEDS = 3  # of glue's fine-tuning


def compare_encoders(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains all runs (or those of `only`); with --tasks-data fine-tunes them, with balanced and with regular
    cross-entropy, beside an untrained model.

    `wrong-labels` has a tenth of its tokens replaced at random before masking, in inputs and labels, as in the
    published code's vanilla runs; `headless-noise` and `vanilla-noise` in the inputs only, as in its headless runs.
    """
    overrides_by_run = GRIDS["encoders"]["axes"]["run"]
    (runs,) = select_names(only, overrides_by_run)
    data = runner.data(encoder=True)
    prefix, rows = Path(data[0].removeprefix("data.train=")), []
    for name in runs:
        config = f"encoder-small-{'headless' if name.startswith('headless') else 'vanilla'}"
        corrupt = [f"data.train={_corrupt_dataset(prefix)}"] if name == "wrong-labels" else []
        rows.append(_final_row(name, runner.train(config, name, *data, *overrides_by_run[name], *corrupt)))
    runner.record("encoders", rows)
    if runner.tasks_data is not None:
        tasks = ["--task", "glue", "superglue", "--data", str(runner.tasks_data), "--floor", *FINE_TUNING]
        for loss, seeds in (("balanced", "2"), ("regular", "1")):
            results = runner.fine_tune(f"glue-{loss}", [*runs], *tasks, "--loss", loss, "--seeds", seeds)
            runner.record(f"encoders-{loss}", task_table(results))


def _final_row(name: str, run: RunMetrics) -> Row:
    """The last held-out scores, by the head that the run evaluated."""
    last = run.validation[-1]
    scores = {f"{last['head']} head: {score}": last[score] for score in ("perplexity", "accuracy")}
    return {"run": name, **scores, "tokens/s": tokens_per_second(run)}


def task_table(results: Sequence[FineTuningResult]) -> list[Row]:
    """A row for each task, a column for each run."""
    return [{Path(name).name: cell for name, cell in row.items()} for row in comparison_table(results)]


def _corrupt_dataset(prefix: Path) -> Path:
    """Writes a copy of the dataset with a tenth of the tokens random, except ends of documents, unless it exists."""
    corrupted = prefix.with_name(f"{prefix.name}-wrong")
    with output_lock(corrupted):
        if not corrupted.with_suffix(".idx").exists():
            dataset, generator = IndexedDataset(prefix), np.random.default_rng(0)
            vocab_size = json.loads(prefix.with_suffix(".json").read_text())["vocab_size"]
            with IndexedDatasetWriter(corrupted, vocab_size=vocab_size) as writer:
                for tokens in (dataset[i] for i in range(len(dataset))):
                    mask = generator.random(len(tokens)) < CORRUPTED_SHARE
                    mask[-1] = False
                    writer.add_document(np.where(mask, generator.integers(0, vocab_size, len(tokens)), tokens))
    return corrupted


def compare_multilingual(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains headless and vanilla (or those of `only`) on a folder of datasets, one a language, made as in
    docs/encoders.md; `--set data.tokenizer=F` is their tokenizer.

    With --tasks-data both, and an untrained model, are fine-tuned in seven languages on half of XNLI's dev set, and
    tested on the other half: in the same language, and, after training on English only, in all.
    """
    folder = runner.require_text()
    parts = sorted(path.with_suffix("") for path in folder.glob("*.idx") if not path.stem.endswith("validation"))
    train = ",".join(f"{{prefix: {part}}}" for part in parts)
    data = [f"data.train=[{train}]", f"data.validation={folder / 'validation'}"]
    cells = runner.grid("multilingual", only, *data)
    records = [{**record, "run": cell.name} for cell in cells for record in cell.run.validation]
    title = "Held-out perplexity of masked tokens"
    chart = Chart.of(records, title, "run", "tokens", "perplexity", log_y=True)
    runner.record("multilingual", [_final_row(cell.name, cell.run) for cell in cells], chart)
    if runner.tasks_data is not None:
        names = [f"xnli/{language}" for language in LANGUAGES]
        tasks = ["--task", *names, "--languages", ",".join(LANGUAGES), "--floor"]
        tasks += ["--data", str(runner.tasks_data), "--epochs", "3", "--learning-rate", "3e-4"]
        tasks += ["--batch-size", "32", "--seeds", "1"]
        results = runner.fine_tune("xnli-seeds", [cell.name for cell in cells], *tasks)
        models = dict.fromkeys(result.model for result in results)
        runner.record("xnli", [_model_row(model, results) for model in models])


def _model_row(model: str, results: Sequence[FineTuningResult]) -> Row:
    """A model's row of accuracies, means over languages for each seed."""
    own_results = [result for result in results if result.model == model]
    scores_by_seed = [
        {result.task.removeprefix("xnli/"): result.scores() for result in own_results if result.seed == seed}
        for seed in sorted({result.seed for result in own_results})
    ]
    english = [mean(tested["accuracy"] for tested in scores["en"].values()) for scores in scores_by_seed]
    accuracies = [{name: tested[name]["accuracy"] for name, tested in scores.items()} for scores in scores_by_seed]
    target = [mean(by_language.values()) for by_language in accuracies]
    row: Row = {"model": Path(model).name, "English only": percent(english), "target language": percent(target)}
    return row | {language: percent([by_language[language] for by_language in accuracies]) for language in LANGUAGES}


def compare_vocabularies(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains encoders of both objectives in vocabularies of each size, on as many tokens; with --tasks-data fine-tunes
    each on GLUE, once."""
    grid, rows = GRIDS["vocabularies"], list[Row]()
    for cell in runner.grid("vocabularies", only):
        row = cell.row(grid["columns"])
        if runner.tasks_data is not None:
            results = fine_tune_on_glue(runner, cell.name, runner.tasks_data, seeds=1)
            (glue,) = (summary for summary in summarize(results) if summary.task == "glue")
            row["GLUE"] = 100 * glue.mean()
        rows.append(row)
    runner.record("vocabularies-runs", rows)
    scores = [name for name in rows[0] if name not in grid["axes"]]
    means = aggregate_seeds(rows, ("vocabulary", "objective"), scores)
    runner.record("vocabularies", means, *(grid_charts("vocabularies", means) if "GLUE" in scores else ()))


def compare_glue(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains related methods (variants of the experiment `neighbours`) for equal FLOPs; with --tasks-data tunes them.

    Held-out perplexity depends on a variant's masks, and for replaced tokens it is the generator's: only fine-tuning
    compares variants.
    """
    (names,) = select_names(only, GRIDS["glue"])
    budget, rows = STEPS * _flops_per_step(runner, PLAIN), []
    for name in names:
        run = _train_variant(runner, name, name, round(budget / _flops_per_step(runner, name)))
        last, trained = run.validation[-1], run.training[-1]
        row = {"run": name, "tokens": trained["tokens"], "PFLOP": run_total_flops(runner, run) / 1e15}
        row |= {"seconds": trained["seconds"], "tokens/s": tokens_per_second(run), "perplexity": last["perplexity"]}
        detected = last.get("detection") or {}  # the share of replaced tokens found, and of others kept
        rows.append(row | {"found": detected.get("found"), "kept": detected.get("kept")})
    runner.record("glue-runs", rows)
    if runner.tasks_data is not None:
        results = [result for name in names for result in fine_tune_on_glue(runner, name, runner.tasks_data)]
        runner.record("glue", task_table(results))


def _flops_per_step(runner: ExperimentRunner, name: str) -> float:
    """FLOPs of a variant's step, the mean over its phases."""
    return run_total_flops(runner, _train_variant(runner, name, f"probe-{name}", PROBE_STEPS)) / PROBE_STEPS


def run_total_flops(runner: ExperimentRunner, run: RunMetrics) -> float:
    """FLOPs of a whole run, by phase and its mean number of candidates."""
    config = config_from_dict(runner.runs[run.name]["config"])
    tokens = config.batch.global_size * config.data.sequence_length
    total = 0.0
    for phase in phases_of(config):
        rows = mean_candidates(run, phase.steps) or config.model.padded_vocab_size()
        total += len(phase.steps) * tokens * run_flops(phase.config, rows).total
    return total


def _train_variant(runner: ExperimentRunner, name: str, folder: str, steps: int) -> RunMetrics:
    config, settings = settings_of_variant(*GRIDS["glue"][name])
    schedule = [f"training.steps={steps}", f"schedule.warmup_steps={max(1, steps // 10)}"]
    if folder != name:
        schedule.append("training.log_seconds=0")
    return runner.train(config, folder, *runner.data(encoder=True), *settings, *schedule)


def fine_tune_on_glue(
    runner: ExperimentRunner, name: str, data: Path, rows: str | None = None, seeds: int | None = None
) -> list[FineTuningResult]:
    """Fine-tunes a run on GLUE with `seeds` seeds (else SEEDS), on `rows` training rows of each task (else
    FINE_TUNING's).

    Each model has its own file of results, so that commands with other models can run at the same time."""
    tasks = ["--task", "glue", "--data", str(data), "--loss", "balanced", "--seeds", str(seeds or SEEDS), *FINE_TUNING]
    return runner.fine_tune(f"glue-{name}", [name], *tasks, *([] if rows is None else ["--max-train-rows", rows]))
