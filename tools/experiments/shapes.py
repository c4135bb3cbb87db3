"""Llama's shape beside Pythia's, and ModernBERT's beside BERT's: headless, equally deep and wide, on the same tokens.

Decoders are the demo's, with its first recipe. Each learns at every learning rate of RATES with the first seed, and at
its best one with the others. Encoders have 7 layers of 288, and learn as configs/modernbert-15m-headless.yaml says, for
ENCODER_STEPS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from demo_pipeline.stages import MODELS
from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, over_seeds, speed
from experiments.recipe import FIRST, settings_of

SEEDS = (0, 1)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
VOCABULARY = 16_384  # the demo's
ENCODERS = {
    "bert": ("family=bert", "intermediate_size=1152", "max_positions=512", "hidden_dropout=0", "attention_dropout=0"),
    "modernbert": (),
}
ENCODER_STEPS = 250
ENCODER_POINTS = 5


def compare_shapes(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains every shape, or those of `only`: pythia, llama, bert, modernbert."""
    along: list[Row] = []
    for shape in (shape for shape in MODELS if not only or shape in only):
        swept = [_decoder(laboratory, shape, rate, SEEDS[0]) for rate in RATES]
        best = min(swept, key=lambda rows: float(rows[-1]["perplexity"]))[-1]["rate"]
        others = [_decoder(laboratory, shape, best, seed) for seed in SEEDS[1:]]
        along += [row for rows in (*swept, *others) for row in rows]
    if along:
        last = [row for row in along if row["step"] == max(row["step"] for row in along)]
        values = ("perplexity", "bits per byte", "accuracy", "tokens/s")
        laboratory.record("shapes", over_seeds(last, ("shape", "rate"), values), _chart(along))
    encoders = [shape for shape in ENCODERS if not only or shape in only]
    points = [row for shape in encoders for row in _encoder(laboratory, shape)]
    if points:
        laboratory.record("shapes-encoders", points, _chart(points))


def _decoder(laboratory: Laboratory, shape: str, rate: float, seed: int) -> list[Row]:
    """Every evaluation of a run."""
    given = [
        *laboratory.data(VOCABULARY),
        *settings_of(FIRST),
        *MODELS[shape],
        f"optimizer.learning_rate={rate:g}",
        f"seed={seed}",
    ]
    run = laboratory.train("demo-headless", f"{shape}-{rate:g}-{seed}", *given)
    about = {"shape": shape, "rate": rate, "seed": seed, "tokens/s": speed(run)}
    return [about | _scores(record) for record in run.validation]


def _encoder(laboratory: Laboratory, shape: str) -> list[Row]:
    """Every evaluation of a run."""
    course = {"steps": ENCODER_STEPS, "checkpoint_every": ENCODER_STEPS}
    course |= {"evaluate_every": ENCODER_STEPS // ENCODER_POINTS}
    given = [f"training.{name}={count}" for name, count in course.items()]
    given += [f"schedule.warmup_steps={ENCODER_STEPS // 10}", f"schedule.decay_steps={ENCODER_STEPS // 5}"]
    settings = [f"model.{setting}" for setting in ENCODERS[shape]]
    run = laboratory.train("modernbert-15m-headless", shape, *laboratory.encoder_data(), *settings, *given)
    return [{"shape": shape, "tokens/s": speed(run), **_scores(record)} for record in run.validation]


def _scores(record: Mapping[str, Any]) -> Row:
    named = {"bits_per_byte": "bits per byte"}
    wanted = ("step", "tokens", "loss", "perplexity", "accuracy", "bits_per_byte")
    return {named.get(name, name): record[name] for name in wanted if name in record}


def _chart(rows: Sequence[Row]) -> Chart:
    named = [{**row, "run": _name(row)} for row in rows]
    return Chart("Held-out perplexity", "tokens", lines(named, "run", "tokens", "perplexity"), log_up=True)


def _name(row: Row) -> str:
    about = [f"{row['rate']:g}", f"seed {row['seed']}"] if "rate" in row else []
    return ", ".join([row["shape"], *about])
