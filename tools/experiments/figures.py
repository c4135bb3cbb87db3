"""The paper's Fig. 3 (time and memory of steps), Fig. 5 with Tables 3 and 4 (decoders), Fig. 8 (negatives); variants of
the objective, and precisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.measures import Chart, Row, aggregate_seeds, evaluation_scores, group_points
from experiments.runner import GRIDS, Cell, ExperimentRunner, grid_charts, select_names, task_scores, training_overrides
from megahead.checkpoints.disk import find_checkpoint
from megahead.config.objective import HeadName
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.run_folder import RunFolder

SHAPES = (("bert-small", 128), ("bert-small", 512), ("bert-base", 128), ("bert-base", 512))
TOKENS = {"bert-small": (512, 1_024, 2_048, 4_096), "bert-base": (512, 1_024, 2_048)}

HEADS: dict[str, tuple[HeadName, ...]] = {"headless": ("tied", "pmi"), "vanilla": ("trained",)}
LINE_NAME = "{objective}, {head} head"
HEAD_STEPS, LONG_HEAD_STEPS, HEAD_POINTS = 40, 160, 8
TRAINING_TASK, FINAL_TASKS = "lambada_openai", "arc_easy,arc_challenge,boolq,crows_pairs_english,race,sciq,pubmedqa"
TRAINING_TASK_LIMIT, FINAL_TASK_LIMIT = 1_000, 300


def compare_latency(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Times steps of both objectives in turn, for every shape (or those of `only`) and size of micro-batch.

    BERT-base with 512 tokens a row, 15 % masked, is the paper's. Needs no text."""
    shapes, rows = {f"{size}-{length}": (size, length) for size, length in SHAPES}, list[Row]()
    (names,) = select_names(only, shapes)
    for name in names:
        size, length = shapes[name]
        batches = [tokens // length for tokens in TOKENS[size] if tokens >= length]
        shape_rows = [row for batch in batches for row in _time_batch(runner, size, length, batch)]
        options = {"log_x": True, "from_zero": True}
        charts = [
            Chart(title, "rows of the micro-batch", group_points(shape_rows, "objective", "batch", column), **options)
            for column, title in {"ms": "Milliseconds a step", "peak MB": "Peak memory, MB"}.items()
        ]
        runner.record(name, shape_rows, *charts)
        rows += [{"shape": name, **row} for row in shape_rows]
    runner.record("latency", rows)


def _time_batch(runner: ExperimentRunner, size: str, length: int, batch: int) -> list[Row]:
    """A row for each objective, with its time as a multiple of headless."""
    output = runner.folder / f"{size}-{length}-{batch * length}.json"
    if not output.exists():
        options = ["--preset", size, "--micro-batch", batch, "--sequence-length", length, "--steps", 3, "--threads", 1]
        runner.run("bench_step.py", *options, "--output", output)
    measured = json.loads(output.read_text())
    columns = ("objective", "ms", "tokens/s", "peak MB")
    return [
        {"batch": batch, **{name: row[name] for name in columns}, "times headless": row["ms"] / measured[0]["ms"]}
        for row in measured
    ]


def compare_decoders(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """A small decoder, headless and vanilla, on the same tokens, with every seed (`only`: seeds).

    Charts held-out perplexity during training against tokens and seconds, with the training-free heads (tied, pmi), the
    vanilla one, and a head trained for more and more steps. Tabulates the same at the end, as means over seeds, with a
    head fine-tuned for an eighth of the training. With --tasks-data also scores LAMBADA during training, and tasks of
    the harness at the end, beside an untrained model.
    """
    (seeds,) = select_names(only, GRIDS["decoders"]["axes"]["seed"]["values"])
    cells = runner.grid("decoders", seed=seeds)
    rows = [row for cell in cells[:2] for row in _checkpoint_rows(runner, cell)]  # both objectives, first seed
    final_rows = [row for row in rows if row["step"] == cells[0].run.training[-1]["step"]]
    rows += _head_rows(runner, seeds[0], f"head-{seeds[0]}-long", LONG_HEAD_STEPS, HEAD_POINTS)
    table_rows = [{name: value for name, value in row.items() if name != "model"} for row in rows]
    title, y = "Held-out perplexity", "perplexity"
    charts = [Chart.of(rows, title, LINE_NAME, x, y, log_y=True) for x in ("tokens", "seconds")]
    runner.record("decoders", table_rows, *charts)
    final_rows += [row for cell in cells[2:] for row in _checkpoint_rows(runner, cell, slice(-1, None))]
    for seed in seeds:
        final_rows += _head_rows(runner, seed, f"head-{seed}", HEAD_STEPS, 1)
    values = ("seconds", "perplexity", "accuracy", "bits per byte")
    runner.record("decoders-ends", aggregate_seeds(final_rows, ("objective", "head", "tokens"), values))
    if runner.tasks_data is not None:
        _score_tasks(runner, seeds[0], rows + final_rows, runner.tasks_data)


def _checkpoint_rows(runner: ExperimentRunner, cell: Cell, points: slice = slice(None)) -> list[Row]:
    """A row for each head of the run's checkpoints at `points`, with scores, tokens and seconds."""
    rows, (seed, objective) = [], (cell.values["seed"], cell.values["objective"])
    for folder in sorted(RunFolder(runner.folder / cell.name).checkpoints.glob("step-*"))[points]:
        step = int(folder.name.split("-")[1])
        log_record = next(record for record in cell.run.training if record["step"] >= step)
        for head in HEADS[objective]:
            row = {"model": str(folder), "objective": objective, "head": head, "seed": seed, "step": step}
            scored = evaluate_checkpoint(folder, head)
            costs = {cost: log_record[cost] for cost in ("tokens", "seconds")}
            rows.append(row | costs | evaluation_scores(vars(scored)))
    return rows


def _head_rows(runner: ExperimentRunner, seed: int, name: str, steps: int, points: int) -> list[Row]:
    """A row for each evaluation of a head trained on the headless run; tokens and seconds are those of both runs."""
    body_run = runner.runs[f"headless-{seed}"]
    overrides = [f"init.from_checkpoint={runner.folder / f'headless-{seed}'}", f"seed={seed}"]
    overrides += training_overrides(steps, evaluate_every=max(1, steps // points))
    run = runner.train("small-head", name, *runner.data(), *overrides)
    rows = []
    for record in run.validation[1:]:  # the first is before training
        log_record = next(logged for logged in run.training if logged["step"] >= record["step"])
        folder = find_checkpoint(runner.folder / name / f"checkpoints/step-{record['step']:08d}")
        row = {"model": str(folder), "objective": "headless", "head": "trained", "seed": seed, "step": record["step"]}
        costs = {cost: body_run[cost] + log_record[cost] for cost in ("tokens", "seconds")}
        rows.append(row | costs | evaluation_scores(record))
    return rows


def _score_tasks(runner: ExperimentRunner, seed: int, rows: Sequence[Row], data: Path) -> None:
    """Scores LAMBADA during training (decoders-lambada), and all tasks at the end (decoders-tasks)."""
    untrained = ["training.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=1e-12"]
    untrained += [setting for setting in GRIDS["decoders"]["settings"] if "steps" not in setting]
    untrained += [f"seed={seed}", "objective.name=vanilla"]
    runner.train("small-headless", f"random-{seed}", *runner.data(), *untrained)
    exported = {Path(row["model"]): row for row in rows if row["head"] != "tied" and row["seed"] == seed}
    points = [model for model in exported if model.exists()]  # of a trained head, only the last ones exist
    columns = ("objective", "head", "step", "tokens", "seconds")
    lambada_rows = [
        {**{name: exported[model][name] for name in columns}, **task_scores(result)}
        for model, results in runner.score("lambada", TRAINING_TASK, TRAINING_TASK_LIMIT, data, points).items()
        for result in results
    ]
    charts = [
        Chart.of(lambada_rows, f"LAMBADA {metric}", LINE_NAME, x, metric, log_y=metric == "perplexity")
        for metric in ("perplexity", "acc")
        if len({row[metric] for row in lambada_rows}) > 1
        for x in ("tokens", "seconds")
    ]
    runner.record("decoders-lambada", lambada_rows, *charts)
    models = [runner.folder / f"{name}-{seed}" for name in ("headless", "head", "vanilla", "random")]
    row_by_metric: dict[tuple[str, str], Row] = {}
    for model, results in runner.score("tasks", FINAL_TASKS, FINAL_TASK_LIMIT, data, models).items():
        for task, score in ((result.task, score) for result in results for score in result.scores):
            row = row_by_metric.setdefault((task, score.metric), {"task": task, "metric": score.metric})
            row[model.name] = f"{score.value:.4g} ± {score.stderr:.2g}"
    runner.record("decoders-tasks", list(row_by_metric.values()))


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
    """Records the last evaluation of each precision and seed, and means over seeds."""
    rows = [cell.row(GRIDS["precision"]["columns"]) for cell in runner.grid("precision", only)]
    runner.record("precision", rows)
    runner.record("precision-ends", aggregate_seeds(rows, ("precision",), ("loss", "perplexity", "tokens/s")))
