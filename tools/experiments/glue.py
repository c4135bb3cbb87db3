"""Small encoders on GLUE, each after as many operations: the plain headless one, the neighbours that led on held-out
text, similar words, next tokens first; of four layers a plain one, and replaced-token detection with a headless and
with a vanilla generator.

What masked tokens are worth at equal tokens: `experiments/neighbours.py`. Held-out perplexity is of each one's own
masks, and of replaced tokens the generator's, so that fine-tuning alone compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.encoders import FINE_TUNING
from experiments.laboratory import Laboratory
from experiments.measures import Row, candidates, speed
from experiments.neighbours import BY_MASKS, DETECTIONS, ENCODERS, FOUR_LAYERS, KINDS, nearest_ids, uses_nearest_ids
from megahead.config.loading import config_from_dict
from megahead.config.plan import phases_of
from megahead.estimate import run_flops
from megahead.evaluate.finetuning import FineTuningResult, FineTuningResults, comparison_table
from megahead.report.read import RunMetrics

SEEDS = 3  # of fine-tuning
STEPS = 2000  # of the plain encoder; the others take as many as cost its operations
PROBE_STEPS = 20  # of a run that tells what a step of a variant costs
PLAIN = "plain"
NEIGHBOURS = (
    *(PLAIN, "rate-40", "frequency", "rate-40-frequency", "rate-40-informative", "similar", "causal-25", "causal-50"),
)
# (config, settings beside its own) of each
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (KINDS["encoder"][0], ENCODERS[name]) for name in NEIGHBOURS},
    "plain-of-4": (KINDS["four-layers"][0], (BY_MASKS, *FOUR_LAYERS[PLAIN])),
    "rate-40-of-4": (KINDS["four-layers"][0], (BY_MASKS, *FOUR_LAYERS["rate-40-of-4"])),
    "electra-headless": (KINDS["detection"][0], DETECTIONS[PLAIN]),
    "electra-vanilla": (KINDS["detection"][0], DETECTIONS["electra-vanilla"]),
}


def compare_glue(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains all variants (or those of `only`), and fine-tunes them where --tasks-data is given."""
    names = [name for name in VARIANTS if not only or name in only]
    budget = STEPS * _a_step(laboratory, PLAIN)
    rows = [_trained(laboratory, name, budget) for name in names]
    laboratory.record("glue-runs", rows)
    if laboratory.tasks_data is not None:
        results = [result for name in names for result in fine_tuned(laboratory, name, laboratory.tasks_data)]
        scores = comparison_table(results)
        laboratory.record("glue", [{Path(key).name: cell for key, cell in row.items()} for row in scores])


def _a_step(laboratory: Laboratory, name: str) -> float:
    """Operations of a variant's step, on average over its phases."""
    return operations(laboratory, _train(laboratory, name, f"probe-{name}", PROBE_STEPS)) / PROBE_STEPS


def operations(laboratory: Laboratory, run: RunMetrics) -> float:
    """Of a whole run: those of each phase, by the candidates that it had."""
    config = config_from_dict(laboratory.runs[run.name]["config"])
    tokens = config.batch.global_size * config.data.sequence_length
    total = 0.0
    for phase in phases_of(config):
        rows = candidates(run, phase.steps) or config.model.padded_vocab_size()
        total += len(phase.steps) * tokens * run_flops(phase.config, rows).total
    return total


def _trained(laboratory: Laboratory, name: str, budget: float) -> Row:
    run = _train(laboratory, name, name, round(budget / _a_step(laboratory, name)))
    last, trained = run.validation[-1], run.training[-1]
    row = {"run": name, "tokens": trained["tokens"], "PFLOP": operations(laboratory, run) / 1e15}
    row |= {"seconds": trained["seconds"], "tokens/s": speed(run), "perplexity": last["perplexity"]}
    told = last.get("detection") or {}
    return row | {"found": told.get("found"), "kept": told.get("kept")}


def _train(laboratory: Laboratory, name: str, folder: str, steps: int) -> RunMetrics:
    config, settings = VARIANTS[name]
    course = [f"training.steps={steps}", f"schedule.warmup_steps={max(1, steps // 10)}"]
    if folder != name:
        course.append("training.log_seconds=0")
    if uses_nearest_ids(settings):  # those of the plain encoder, whose operations are not counted here
        _train(laboratory, PLAIN, PLAIN, STEPS)
    given = [*laboratory.encoder_data(), *settings, *nearest_ids(laboratory, PLAIN, settings)]
    return laboratory.train(config, folder, *given, *course)


def fine_tuned(laboratory: Laboratory, name: str, data: Path, rows: str | None = None) -> list[FineTuningResult]:
    """On GLUE, with SEEDS; `rows` of each task to learn from, or as many as FINE_TUNING says. Results are kept for each
    model in a file of its own, so that commands with other models can run beside."""
    output = laboratory.folder / f"glue-{name}.json"
    tasks = ["--task", "glue", "--data", str(data), "--loss", "balanced", "--seeds", str(SEEDS)]
    models, more = ["--model", str(laboratory.folder / name)], [] if rows is None else ["--max-train-rows", rows]
    laboratory.run("finetune.py", *models, *tasks, *FINE_TUNING, *more, "--output", str(output))
    return FineTuningResults(output).newest()
