"""The paper's Fig. 3 (time and memory of steps), and Fig. 5 with Tables 3 and 4 (decoders)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.measures import Chart, Row, lines, over_seeds, scores
from experiments.runner import GRIDS, Cell, ExperimentRunner, course, scores_of
from megahead.checkpoints.disk import find_checkpoint
from megahead.config.objective import HeadName
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.run_folder import RunFolder

SHAPES = (("bert-small", 128), ("bert-small", 512), ("bert-base", 128), ("bert-base", 512))
TOKENS = {"bert-small": (512, 1_024, 2_048, 4_096), "bert-base": (512, 1_024, 2_048)}

HEADS: dict[str, tuple[HeadName, ...]] = {"headless": ("tied", "pmi"), "vanilla": ("trained",)}
RUN = "{objective}, {head} head"
HEAD_STEPS, LONG_HEAD_STEPS, HEAD_POINTS = 40, 160, 8
ALONG, AT_THE_END = "lambada_openai", "arc_easy,arc_challenge,boolq,crows_pairs_english,race,sciq,pubmedqa"
ALONG_LIMIT, LIMIT = 1_000, 300


def compare_latency(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Times a step of both objectives in turn, in every shape (or those of `only`, `bert-base-512`) and micro-batches
    of so many tokens; BERT-base of 512 tokens a row, 15 % masked, is the paper's. Needs no text."""
    rows: list[Row] = []
    for size, length in SHAPES:
        if only and f"{size}-{length}" not in only:
            continue
        batches = [tokens // length for tokens in TOKENS[size] if tokens >= length]
        mine = [row for batch in batches for row in _timed(runner, size, length, batch)]
        charts = [
            Chart(title, "rows of the micro-batch", lines(mine, "objective", "batch", column), True, from_zero=True)
            for column, title in {"ms": "Milliseconds a step", "peak MB": "Peak memory, MB"}.items()
        ]
        runner.record(f"{size}-{length}", mine, *charts)
        rows += [{"shape": f"{size}-{length}", **row} for row in mine]
    runner.record("latency", rows)


def _timed(runner: ExperimentRunner, size: str, length: int, batch: int) -> list[Row]:
    """A row for each objective; one that is slower than headless says how many times."""
    output = runner.folder / f"{size}-{length}-{batch * length}.json"
    if not output.exists():
        what = ["--preset", size, "--micro-batch", batch, "--sequence-length", length, "--steps", 3, "--threads", 1]
        runner.run("bench_step.py", *what, "--output", output)
    timed = json.loads(output.read_text())
    columns = ("objective", "ms", "tokens/s", "peak MB")
    return [
        {"batch": batch, **{name: row[name] for name in columns}, "times headless": row["ms"] / timed[0]["ms"]}
        for row in timed
    ]


def compare_decoders(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """A small decoder, headless and vanilla, on the same tokens, with every seed (`only`: seeds).

    Along training, against tokens and seconds: held-out perplexity with the heads that need no training (tied, pmi) and
    the vanilla one, and LAMBADA; and how far a head must be trained to be worth more than the one that needs none. At
    the end, over seeds: the same, with a head fine-tuned for an eighth of the training. Where --tasks-data is given the
    harness's tasks, beside a model that has learned nothing.
    """
    seeds = [seed for seed in GRIDS["decoders"]["axes"]["seed"]["values"] if not only or str(seed) in only]
    cells = runner.grid("decoders", seed=seeds)
    along = [row for cell in cells[:2] for row in _along(runner, cell)]
    ends = [row for row in along if row["step"] == cells[0].run.training[-1]["step"]]
    along += _head_along(runner, seeds[0], f"head-{seeds[0]}-long", LONG_HEAD_STEPS, HEAD_POINTS)
    without = [{name: value for name, value in row.items() if name != "model"} for row in along]
    axes = ("tokens", "seconds")
    charts = [Chart("Held-out perplexity", x, lines(along, RUN, x, "perplexity"), log_up=True) for x in axes]
    runner.record("decoders", without, *charts)
    ends += [row for cell in cells[2:] for row in _along(runner, cell, slice(-1, None))]
    for seed in seeds:
        ends += _head_along(runner, seed, f"head-{seed}", HEAD_STEPS, 1)
    values = ("seconds", "perplexity", "accuracy", "bits per byte")
    runner.record("decoders-ends", over_seeds(ends, ("objective", "head", "tokens"), values))
    if runner.tasks_data is not None:
        _tasks(runner, seeds[0], along + ends, runner.tasks_data)


def _along(runner: ExperimentRunner, cell: Cell, points: slice = slice(None)) -> list[Row]:
    """What each head of the run's checkpoints, those at `points`, reaches after how much."""
    rows, (seed, objective) = [], (cell.values["seed"], cell.values["objective"])
    for folder in sorted(RunFolder(runner.folder / cell.name).checkpoints.glob("step-*"))[points]:
        step = int(folder.name.split("-")[1])
        spent = next(record for record in cell.run.training if record["step"] >= step)
        for head in HEADS[objective]:
            row = {"model": str(folder), "objective": objective, "head": head, "seed": seed, "step": step}
            scored = evaluate_checkpoint(folder, head)
            found = {name: getattr(scored, name) for name in ("perplexity", "accuracy", "bits_per_byte")}
            rows.append(row | {cost: spent[cost] for cost in ("tokens", "seconds")} | scores(found))
    return rows


def _head_along(runner: ExperimentRunner, seed: int, name: str, steps: int, points: int) -> list[Row]:
    """What a head trained on top of the headless run reaches; tokens and seconds are those of both runs."""
    body = runner.runs[f"headless-{seed}"]
    given = [f"init.from_checkpoint={runner.folder / f'headless-{seed}'}", f"seed={seed}"]
    given += course(steps, evaluate_every=max(1, steps // points))
    run = runner.train("small-head", name, *runner.data(), *given)
    rows = []
    for record in run.validation[1:]:  # the first is of what it starts from
        spent = next(one for one in run.training if one["step"] >= record["step"])
        folder = find_checkpoint(runner.folder / name / f"checkpoints/step-{record['step']:08d}")
        row = {"model": str(folder), "objective": "headless", "head": "trained", "seed": seed, "step": record["step"]}
        rows.append(row | {cost: body[cost] + spent[cost] for cost in ("tokens", "seconds")} | scores(record))
    return rows


def _tasks(runner: ExperimentRunner, seed: int, rows: Sequence[Row], data: Path) -> None:
    """LAMBADA along training (decoders-lambada), and all tasks at the end beside random weights (tasks.json)."""
    untrained = ["training.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=1e-12"]
    untrained += [one for one in GRIDS["decoders"]["settings"] if "steps" not in one]
    untrained += [f"seed={seed}", "objective.name=vanilla"]
    runner.train("small-headless", f"random-{seed}", *runner.data(), *untrained)
    exported = {Path(row["model"]): row for row in rows if row["head"] != "tied" and row["seed"] == seed}
    points = [model for model in exported if model.exists()]  # a head's last
    known = ("objective", "head", "step", "tokens", "seconds")
    along = [
        {**{name: exported[model][name] for name in known}, **scores_of(result)}
        for model, results in runner.score("lambada", ALONG, ALONG_LIMIT, data, points).items()
        for result in results
    ]
    charts = [
        Chart(f"LAMBADA {metric}", across, lines(along, RUN, across, metric), log_up=metric == "perplexity")
        for metric in ("perplexity", "acc")
        if len({row[metric] for row in along}) > 1
        for across in ("tokens", "seconds")
    ]
    runner.record("decoders-lambada", along, *charts)
    ends = [runner.folder / f"{name}-{seed}" for name in ("headless", "head", "vanilla", "random")]
    beside: dict[tuple[str, str], Row] = {}
    for model, results in runner.score("tasks", AT_THE_END, LIMIT, data, ends).items():
        for task, score in ((result.task, score) for result in results for score in result.scores):
            row = beside.setdefault((task, score.metric), {"task": task, "metric": score.metric})
            row[model.name] = f"{score.value:.4g} ± {score.stderr:.2g}"
    runner.record("decoders-tasks", list(beside.values()))
