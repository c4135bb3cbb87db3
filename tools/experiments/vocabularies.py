"""Vocabularies of 8k to 128k ids (the paper's Fig. 7): speed and quality of both objectives on the same text.

For each size a byte-level BPE is trained, the text is tokenized and a small decoder learns the same number of tokens
headless and vanilla. Texts of different vocabularies are compared in bits per byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, speed

SIZES = (8_192, 16_384, 32_768, 65_536, 131_072)
STEPS = 50


def compare_vocabularies(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains a pair for each size (or those of `only`, numbers)."""
    rows: list[Row] = []
    for size in SIZES:
        if not only or str(size) in only:
            runs = {name: _train(laboratory, name, size) for name in ("headless", "vanilla")}
            ratio = runs["headless"]["tokens/s"] / runs["vanilla"]["tokens/s"]
            rows += [{**row, "headless is faster": ratio} for row in runs.values()]
    charts = [
        Chart(
            "Tokens a second", "vocabulary", lines(rows, "objective", "vocabulary", "tokens/s"), True, from_zero=True
        ),
        Chart("Bits per byte", "vocabulary", lines(rows, "objective", "vocabulary", "bits per byte"), True),
    ]
    laboratory.record("vocabularies", rows, *charts)


def _train(laboratory: Laboratory, objective: str, size: int) -> Row:
    length = [f"training.steps={STEPS}", f"training.checkpoint_every={STEPS}", f"training.evaluate_every={STEPS}"]
    given = [*laboratory.data(size), f"objective.name={objective}"]
    run = laboratory.train("small-headless", f"{objective}-{size}", *given, *length)
    last = run.validation[-1]
    row = {"vocabulary": size, "objective": objective, "bits per byte": last["bits_per_byte"]}
    return row | {"perplexity": last["perplexity"], "tokens/s": speed(run)}
