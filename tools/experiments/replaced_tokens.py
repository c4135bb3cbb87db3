"""A small encoder by replaced-token detection, with a headless and with a vanilla generator, beside the plain headless
one: on GLUE, after as many operations and after as many tokens.

Held-out perplexity is the generator's there, so that fine-tuning alone compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.encoders import FINE_TUNING
from experiments.laboratory import Laboratory
from experiments.measures import Row, candidates, speed
from megahead.config import config_from_dict
from megahead.estimate import run_flops
from megahead.evaluate.finetuning import FineTuningResults, comparison_table
from megahead.report import RunMetrics

SEEDS = 3
"""Of fine-tuning."""

STEPS = 2000
PLAIN = "headless"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    PLAIN: ("encoder-small-headless", ()),
    "electra-headless": ("encoder-small-electra-headless", ()),
    "electra-vanilla": ("encoder-small-electra-headless", ("objective.name=vanilla", "objective.tied=true")),
}
"""(config, settings beside its own) of each."""


def compare_replaced_tokens(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains the plain encoder, and all others (or those of `only`) to its tokens and to its operations; fine-tunes all
    of them where --tasks-data is given."""
    rows = [_train(laboratory, PLAIN, "tokens", STEPS)]
    for name in [name for name in VARIANTS if name != PLAIN and (not only or name in only)]:
        rows.append(_train(laboratory, name, "tokens", STEPS))
        steps = round(STEPS * rows[0]["PFLOP"] / rows[-1]["PFLOP"])
        rows.append(_train(laboratory, name, "operations", steps))
    laboratory.record("replaced_tokens", rows)
    if laboratory.tasks_data is not None:
        _fine_tune(laboratory, [f"{row['run']}-{row['at equal']}" for row in rows], laboratory.tasks_data)


def _train(laboratory: Laboratory, name: str, equal: str, steps: int) -> Row:
    config, settings = VARIANTS[name]
    course = f"training.steps={steps}", f"schedule.warmup_steps={steps // 10}"
    run = laboratory.train(config, f"{name}-{equal}", *laboratory.encoder_data(), *settings, *course)
    last, trained = run.validation[-1], run.training[-1]
    row = {"run": name, "at equal": equal, "tokens": trained["tokens"], "seconds": trained["seconds"]}
    row |= {"PFLOP": operations(laboratory, run) * trained["tokens"] / 1e15, "tokens/s": speed(run)}
    told = last.get("detection") or {}
    return row | {"perplexity": last["perplexity"], "found": told.get("found"), "kept": told.get("kept")}


def operations(laboratory: Laboratory, run: RunMetrics) -> float:
    """Of training on one token."""
    config = config_from_dict(laboratory.runs[run.name]["config"])
    return run_flops(config, candidates(run) or config.model.padded_vocab_size()).total


def _fine_tune(laboratory: Laboratory, runs: Sequence[str], data: Path) -> None:
    models, output = [str(laboratory.folder / name) for name in runs], laboratory.folder / "glue.json"
    tasks = ["--task", "glue", "--data", str(data), "--loss", "balanced", "--seeds", str(SEEDS)]
    laboratory.run("finetune.py", "--model", *models, *tasks, *FINE_TUNING, "--output", str(output))
    rows = comparison_table(FineTuningResults(output).newest())
    laboratory.record("replaced_tokens-glue", [{Path(key).name: cell for key, cell in row.items()} for row in rows])
