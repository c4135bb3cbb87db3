"""A small decoder, headless and vanilla, on the same tokens (the paper's Tables 3 and 4, and Fig. 5).

Along training: held-out perplexity with the heads that need no training (tied, pmi) and the vanilla one, and LAMBADA,
against tokens and against seconds; and how far a head must be trained to be worth more than the one that needs none. At
the end, over seeds: the same, with a head fine-tuned for an eighth of the training; and the harness's tasks beside a
model that has learned nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, beside, lines, over_seeds, score, scores_of
from megahead.config.objective import HeadName
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.report.read import RunMetrics
from megahead.run_folder import RunFolder

SEEDS = (0, 1, 2)
STEPS, POINTS = 320, 4
HEAD_STEPS, LONG_HEAD_STEPS, HEAD_POINTS = 40, 160, 8
HEADS: dict[str, tuple[HeadName, ...]] = {"headless": ("tied", "pmi"), "vanilla": ("trained",)}
ALONG, AT_THE_END = "lambada_openai", "arc_easy,arc_challenge,boolq,crows_pairs_english,race,sciq,pubmedqa"
ALONG_LIMIT, LIMIT = 1_000, 300


def compare_decoders(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains both objectives with every seed; `only`: seeds. Tasks are scored where --tasks-data is given."""
    seeds = [seed for seed in SEEDS if not only or str(seed) in only]
    along = [row for objective in HEADS for row in _along(laboratory, objective, seeds[0])]
    along += _head_along(laboratory, seeds[0], f"head-{seeds[0]}-long", LONG_HEAD_STEPS, HEAD_POINTS)
    laboratory.record("decoders", _without_model(along), *_charts(along))
    ends = []
    for seed in seeds:
        for objective in HEADS:
            ends += _along(laboratory, objective, seed, slice(-1, None))
        ends += _head_along(laboratory, seed, f"head-{seed}", HEAD_STEPS, 1)
    values = ("seconds", "perplexity", "accuracy", "bits per byte")
    laboratory.record("decoders-ends", over_seeds(ends, ("objective", "head", "tokens"), values))
    if laboratory.tasks_data is not None:
        _tasks(laboratory, seeds[0], along + ends, laboratory.tasks_data)


def _along(laboratory: Laboratory, objective: str, seed: int, points: slice = slice(None)) -> list[Row]:
    """What each head of the run's checkpoints, those at `points`, reaches after how much."""
    run = _train(laboratory, objective, seed, [f"training.steps={STEPS}", f"objective.name={objective}"])
    rows = []
    for folder in _checkpoints(laboratory, f"{objective}-{seed}")[points]:
        step = int(folder.name.split("-")[1])
        spent = next(record for record in run.training if record["step"] >= step)
        for head in HEADS[objective]:
            scored = evaluate_checkpoint(folder, head)
            row = {"model": str(folder), "objective": objective, "head": head, "seed": seed, "step": step}
            row |= {"tokens": spent["tokens"], "seconds": spent["seconds"], "perplexity": scored.perplexity}
            rows.append(row | {"accuracy": scored.accuracy, "bits per byte": scored.bits_per_byte})
    return rows


def _head_along(laboratory: Laboratory, seed: int, name: str, steps: int, points: int) -> list[Row]:
    """What a head trained on top of the headless run reaches; tokens and seconds are those of both runs."""
    body = laboratory.runs[f"headless-{seed}"]
    given = [f"init.from_checkpoint={laboratory.folder / f'headless-{seed}'}", f"seed={seed}"]
    course = [f"training.steps={steps}", f"training.evaluate_every={max(1, steps // points)}"]
    run = laboratory.train(
        "small-head", name, *laboratory.data(), *given, *course, f"training.checkpoint_every={steps}"
    )
    rows = []
    for record in run.validation[1:]:  # the first is of what it starts from
        spent = next(one for one in run.training if one["step"] >= record["step"])
        folder = laboratory.folder / name / f"checkpoints/step-{record['step']:08d}"
        row = {"model": str(folder), "objective": "headless", "head": "trained", "seed": seed, "step": record["step"]}
        row |= {both: body[both] + spent[both] for both in ("tokens", "seconds")}
        row |= {"perplexity": record["perplexity"], "accuracy": record["accuracy"]}
        rows.append(row | {"bits per byte": record["bits_per_byte"]})
    return rows


def _charts(rows: Sequence[Row]) -> list[Chart]:
    return [
        Chart("Held-out perplexity", across, lines(_named(rows), "run", across, "perplexity"), log_up=True)
        for across in ("tokens", "seconds")
    ]


def _without_model(rows: Sequence[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "model"} for row in rows]


def _named(rows: Sequence[Row]) -> list[Row]:
    return [row | {"run": f"{row['objective']}, {row['head']} head"} for row in rows]


def _train(laboratory: Laboratory, name: str, seed: int, overrides: Sequence[str]) -> RunMetrics:
    every = max(1, STEPS // POINTS)
    course = [f"training.checkpoint_every={every}", f"training.keep_checkpoints={POINTS}", f"seed={seed}"]
    return laboratory.train("small-headless", f"{name}-{seed}", *laboratory.data(), *course, *overrides)


def _checkpoints(laboratory: Laboratory, run: str) -> list[Path]:
    return sorted(RunFolder(laboratory.folder / run).checkpoints.glob("step-*"))


def _tasks(laboratory: Laboratory, seed: int, rows: Sequence[Row], data: Path) -> None:
    """LAMBADA along training (decoders-lambada), and all tasks at the end beside random weights (tasks.json)."""
    untrained = ["training.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=1e-12"]
    _train(laboratory, "random", seed, [*untrained, "objective.name=vanilla"])
    exported = {Path(row["model"]): row for row in rows if row["head"] != "tied" and row["seed"] == seed}
    points = [model for model in exported if model.exists()]
    known = ("objective", "head", "step", "tokens", "seconds")
    along = [
        {**{name: exported[model][name] for name in known}, **scores_of(result)}
        for model, results in score(laboratory, "lambada", ALONG, ALONG_LIMIT, data, points).items()
        for result in results
    ]
    charts = [
        Chart(f"LAMBADA {metric}", across, lines(_named(along), "run", across, metric), log_up=metric == "perplexity")
        for metric in ("perplexity", "acc")
        if len({row[metric] for row in along}) > 1
        for across in ("tokens", "seconds")
    ]
    laboratory.record("decoders-lambada", along, *charts)
    ends = [laboratory.folder / f"{name}-{seed}" for name in ("headless", "head", "vanilla", "random")]
    laboratory.record("decoders-tasks", beside(score(laboratory, "tasks", AT_THE_END, LIMIT, data, ends)))
