"""A decoder changes its vocabulary: tokens and minutes until its bits per byte are back, headless and with a softmax.

A headless decoder learns --text in 8,192 ids. Then it gets those of a larger vocabulary of the same text, and those of
--tokenizer where one is given (a multilingual one, say); the rows of new tokens begin as the means of their pieces.
Both objectives train the table alone, or all weights, at the same learning rate. All of the held-out text is read each
time, so that bits per byte are of the same bytes in every vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, speed
from megahead.data.tokenizer import load_tokenizer
from megahead.report.read import RunMetrics

LARGER = 32_768
STEPS = 320
STEPS_AFTER = 160
EVERY = 10
HELD_OUT = 500  # one document in so many: reading all of it costs little beside training
# The softmax over all ids scores by the table itself where that alone is trained, else by a head that starts as it
WAYS = {
    "headless-table": ("objective.name=headless", "init.mode=table"),
    "headless-all": ("objective.name=headless", "init.mode=continue"),
    "softmax-table": ("objective.name=vanilla", "objective.tied=true", "init.mode=table"),
    "softmax-all": ("objective.name=vanilla", "init.mode=finetune"),
}


def compare_revocabulary(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains the decoder, and each way (or those of `only`) from it in each new vocabulary."""
    runs = replace(laboratory, folder=laboratory.folder / "runs", held_out=HELD_OUT)
    base = runs.train("small-headless", "base", *runs.data(), *_course(STEPS, STEPS))
    goal = base.validation[-1]["bits_per_byte"]
    texts = {f"{LARGER:,} ids": runs.data(LARGER)}
    if runs.tokenizer is not None:
        texts[runs.tokenizer.stem] = runs.data_in(runs.tokenizer)
    rows: list[Row] = []
    charts: list[Chart] = []
    for name, text in texts.items():
        given = [*text, *_moved(runs, name, text), *_course(STEPS_AFTER, EVERY)]
        points: list[Row] = []
        for way in (way for way in WAYS if not only or way in only):
            run = runs.train("small-headless", run_name(name, way), *given, *WAYS[way])
            rows.append({"vocabulary": name, "way": way, **_back(run, goal), "tokens/s": speed(run)})
            points += [{**record, "way": way} for record in run.validation]
        before = {"before": [(point["tokens"], goal) for point in points]}
        charts.append(Chart(name, "tokens", lines(points, "way", "tokens", "bits_per_byte") | before))
    laboratory.record("revocabulary", rows, *charts)


def run_name(*words: str) -> str:
    """As a run's name must be: `32,768 ids` becomes `32768-ids`."""
    return "-".join(words).replace(",", "").replace(" ", "-")


def _course(steps: int, every: int) -> list[str]:
    course = {"steps": steps, "checkpoint_every": steps, "evaluate_every": every, "evaluate_samples": 1_000_000}
    return [f"training.{name}={count}" for name, count in course.items()]


def _moved(laboratory: Laboratory, name: str, text: Sequence[str]) -> list[str]:
    """Settings that begin with the base in the vocabulary of `text`; converted where that was not done."""
    tokenizer = next(one.partition("=")[2] for one in text if one.startswith("data.tokenizer="))
    moved = laboratory.folder / run_name("moved", name)
    arguments = ["--model", str(laboratory.folder / "base"), "--tokenizer", tokenizer, "--output", str(moved)]
    laboratory.make(moved, "convert.py", "revocabulary", *arguments)
    return [f"model.vocab_size={load_tokenizer(Path(tokenizer)).vocab_size}", f"init.from_checkpoint={moved}"]


def _back(run: RunMetrics, goal: float) -> Row:
    """When an evaluation is first as good as `goal`, in tokens and in minutes at the run's median speed; the first
    evaluation, and the last."""
    first = next(record for record in run.validation if record["step"])
    reached = next((record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal), None)
    return {
        "tokens until back": reached,
        "minutes until back": None if reached is None else reached / speed(run) / 60,
        f"bits per byte after {first['step']} steps": first["bits_per_byte"],
        "at the end": run.validation[-1]["bits_per_byte"],
    }
