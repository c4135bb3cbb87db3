"""A decoder changes its vocabulary: tokens and minutes until its bits per byte are back, headless and with a softmax.

A headless decoder learns --text in 8,192 ids. Then it gets those of a larger vocabulary of the same text, and those of
--tokenizer where one is given (a multilingual one, say); the rows of new tokens begin as the means of their pieces.
Both objectives train the table alone, or all weights, at the same learning rate; held-out text is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, speed
from megahead.corpus import load_tokenizer
from megahead.report import RunMetrics

LARGER = 32_768
STEPS = 320
EVERY = 10
WAYS = {
    "headless-table": ("objective.name=headless", "init.mode=table"),
    "headless-all": ("objective.name=headless", "init.mode=continue"),
    "softmax-table": ("objective.name=vanilla", "objective.tied=true", "init.mode=table"),
    "softmax-all": ("objective.name=vanilla", "init.mode=finetune"),
}
"""The softmax over all ids scores by the table itself where that alone is trained, else by a head that starts as it."""


def compare_revocabulary(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains the decoder, and each way (or those of `only`) from it in each new vocabulary."""
    base = laboratory.train("small-headless", "base", *laboratory.data(), *_course(STEPS))
    goal = base.validation[-1]["bits_per_byte"]
    texts = {f"{LARGER:,} ids": laboratory.data(LARGER)}
    if laboratory.tokenizer is not None:
        texts[laboratory.tokenizer.stem] = laboratory.data_in(laboratory.tokenizer)
    rows: list[Row] = []
    points: list[Row] = []
    for name, text in texts.items():
        given = [*text, *_moved(laboratory, name, text)]
        for way in (way for way in WAYS if not only or way in only):
            run = laboratory.train(
                "small-headless", f"{name}-{way}".replace(" ", "-"), *given, *WAYS[way], *_course(EVERY)
            )
            rows.append({"vocabulary": name, "way": way, **_back(run, goal), "tokens/s": speed(run)})
            points += [{**record, "way": f"{name}, {way}"} for record in run.validation]
    chart = Chart(f"Bits per byte ({goal:.3f} before)", "tokens", lines(points, "way", "tokens", "bits_per_byte"))
    laboratory.record("revocabulary", rows, chart)


def _course(every: int) -> list[str]:
    return [f"training.steps={STEPS}", f"training.checkpoint_every={STEPS}", f"training.evaluate_every={every}"]


def _moved(laboratory: Laboratory, name: str, text: Sequence[str]) -> list[str]:
    """Settings that begin with the base in the vocabulary of `text`; converted where that was not done."""
    tokenizer = next(one.partition("=")[2] for one in text if one.startswith("data.tokenizer="))
    moved = laboratory.folder / f"moved-{name}".replace(" ", "-")
    arguments = ["--model", str(laboratory.folder / "base"), "--tokenizer", tokenizer, "--output", str(moved)]
    laboratory.make(moved, "convert.py", "revocabulary", *arguments)
    return [f"model.vocab_size={load_tokenizer(Path(tokenizer)).vocab_size}", f"init.from_checkpoint={moved}"]


def _back(run: RunMetrics, goal: float) -> Row:
    """When an evaluation is first as good as `goal`; the first, and the last."""
    reached = next((record for record in run.validation if record["bits_per_byte"] <= goal), None)
    return {
        "tokens until back": None if reached is None else reached["tokens"],
        "minutes until back": None if reached is None else reached["seconds"] / 60,
        f"bits per byte after {run.validation[0]['step']} steps": run.validation[0]["bits_per_byte"],
        "at the end": run.validation[-1]["bits_per_byte"],
    }
