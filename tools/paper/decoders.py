"""A small decoder, headless and vanilla, on the same tokens (the paper's Tables 3 and 4, and Fig. 5).

Along training: held-out perplexity with the heads that need no training (tied, pmi) and the vanilla one, and LAMBADA,
against tokens and against seconds. At the end, over seeds: the same, with a head fine-tuned for an eighth of the
training; and the harness's tasks beside a model that has learned nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megahead.convert.heads import HeadName
from megahead.evaluate.offline import evaluate_checkpoint
from megahead.report import RunMetrics
from paper.laboratory import Laboratory

SEEDS = (0, 1, 2)
STEPS, POINTS, HEAD_STEPS = 320, 4, 40
HEADS: dict[str, tuple[HeadName, ...]] = {"headless": ("tied", "pmi"), "vanilla": ("trained",)}
ALONG, AT_THE_END = "lambada_openai", "arc_easy,arc_challenge,boolq,crows_pairs_english,race,sciq,pubmedqa"
LIMIT = "300"


def compare_decoders(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains both objectives with every seed; `only`: seeds. Tasks are scored where --tasks-data is given."""
    seeds = [seed for seed in SEEDS if not only or str(seed) in only]
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for objective in HEADS:
            rows += _along(laboratory, objective, seed, every_point=seed == seeds[0])
        rows.append(_with_trained_head(laboratory, seed))
    laboratory.record("decoders", rows)
    _tasks(laboratory, seeds[0])


def _along(laboratory: Laboratory, objective: str, seed: int, *, every_point: bool) -> list[dict[str, Any]]:
    """Rows of the run's checkpoints (or its last one): what each of its heads reaches, after how much."""
    run = _train(laboratory, objective, seed, [f"training.steps={STEPS}", f"objective.name={objective}"])
    seconds = {record["step"]: record["seconds"] for record in run.training}
    folders = _checkpoints(laboratory, f"{objective}-{seed}")
    return [
        _row(objective, seed, head, folder, seconds)
        for folder in (folders if every_point else folders[-1:])
        for head in HEADS[objective]
    ]


def _row(objective: str, seed: int, head: HeadName, folder: Path, seconds: dict[int, float]) -> dict[str, Any]:
    step, scored = int(folder.name.split("-")[1]), evaluate_checkpoint(folder, head)
    names = {"objective": objective, "head": head, "seed": seed, "step": step, "seconds": seconds.get(step)}
    return names | {"perplexity": scored.perplexity, "accuracy": scored.accuracy, "bits per byte": scored.bits_per_byte}


def _with_trained_head(laboratory: Laboratory, seed: int) -> dict[str, Any]:
    origin = f"init.from_checkpoint={laboratory.folder / f'headless-{seed}'}"
    given = [*laboratory.data(), origin, f"seed={seed}", f"training.steps={HEAD_STEPS}"]
    run = laboratory.train("small-head", f"head-{seed}", *given, f"training.checkpoint_every={HEAD_STEPS}")
    (folder,) = _checkpoints(laboratory, f"head-{seed}")
    last = run.training[-1]
    return _row("headless", seed, "trained", folder, {last["step"]: last["seconds"]})


def _train(laboratory: Laboratory, name: str, seed: int, overrides: Sequence[str]) -> RunMetrics:
    every = max(1, STEPS // POINTS)
    course = [f"training.checkpoint_every={every}", f"training.keep_checkpoints={POINTS}", f"seed={seed}"]
    return laboratory.train("small-headless", f"{name}-{seed}", *laboratory.data(), *course, *overrides)


def _checkpoints(laboratory: Laboratory, run: str) -> list[Path]:
    return sorted((laboratory.folder / run / "checkpoints").glob("step-*"))


def _tasks(laboratory: Laboratory, seed: int) -> None:
    """LAMBADA along training, and all tasks at the end beside random weights: curves.png, along.json, end.json."""
    if laboratory.tasks_data is None:
        return
    untrained = ["training.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=1e-12"]
    _train(laboratory, "random", seed, [*untrained, "objective.name=vanilla"])
    runs = [f"headless-{seed}", f"vanilla-{seed}"]
    points = [str(folder) for run in runs for folder in _checkpoints(laboratory, run)]
    shared = ["--data", str(laboratory.tasks_data), "--limit", LIMIT]
    curve = ["--curve", str(laboratory.folder / "curves.png"), "--output", str(laboratory.folder / "along.json")]
    laboratory.run("eval_harness.py", "--tasks", ALONG, *shared, *curve, "--model", *points)
    ends = [
        str(laboratory.folder / run)
        for run in (f"headless-{seed}", f"head-{seed}", f"vanilla-{seed}", f"random-{seed}")
    ]
    output = ["--output", str(laboratory.folder / "end.json")]
    laboratory.run("eval_harness.py", "--tasks", AT_THE_END, *shared, *output, "--model", *ends)
