"""Headless, vanilla, or headless and then vanilla? Models that end at the same time.

- `narrow`, decoders of Pythia-14M's depth: two long runs and branches of both (`courses.py`), of a second seed the
  shorter part, and headless once more on as many tokens as vanilla read.
- `wide`: of twice the width, both once and for a shorter time.
- `long`: both for 105 M tokens, however long they take, with lower rates: headless four and a half hours of a core.
- `level`: the same for 31.5 M tokens; `wide-level`: of twice the width, for 10.5 M and 5.2 M.
- `encoder`, ModernBERTs of four layers: the same runs as `narrow` for more tokens, but without a switch.

Along training: held-out perplexity, a cloze (decoders), and where --tasks-data is given BLiMP; of each end then all of
BLiMP and LAMBADA, of encoders BLiMP and, of the longest runs, GLUE.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.charts import Chart
from experiments.courses import Part
from experiments.glue import fine_tuned
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, over_seeds
from experiments.race import WHOLE, Race
from experiments.recipe import KINDS
from megahead.errors import FieldError
from megahead.evaluate.finetuning import comparison_table

NARROW, WIDE = (("model.hidden_size=128", "model.num_heads=4"), ("model.hidden_size=256", "model.num_heads=4"))
HALF = {
    "headless": ("optimizer.learning_rate=4e-3", "optimizer.table.learning_rate_ratio=1"),
    "vanilla": ("optimizer.learning_rate=8e-3", "optimizer.table.learning_rate_ratio=0.5"),
}
"""Half the rates that climbs of short runs found, and a quarter for the embedding (vanilla: and for the head)."""
PARTS = {
    "narrow": Part(
        shape=NARROW,
        budgets={0: (5, 15), 1: (5,)},
        switches={5: (0.05, 0.1, 0.2, 0.4), 15: (0.2,)},
    ),
    "wide": Part(
        shape=WIDE,
        budgets={0: (5,)},
        switches={},
        kinds=("headless", "vanilla"),
        unit=64,
    ),
    "wide-level": Part(
        shape=WIDE,
        budgets={0: (5, 10)},
        switches={},
        kinds=("headless", "vanilla"),
        unit=64,
        vanilla_unit=64,
    ),
    "long": Part(
        shape=NARROW,
        budgets={0: (50,), 1: (50,)},
        switches={},
        kinds=("headless", "vanilla"),
        vanilla_unit=128,
        decay=0.6,
        longer=HALF,
    ),
    "level": Part(
        shape=NARROW,
        budgets={0: (15,)},
        switches={},
        kinds=("headless", "vanilla"),
        vanilla_unit=128,
        longer=HALF,
    ),
    "encoder": Part(
        shape=tuple(KINDS["encoder"].shape),
        budgets={0: (5, 25), 1: (5,)},
        switches={},
        kinds=("headless", "vanilla"),
        unit=512,
        config="modernbert-15m-headless",
        encoder=True,
        vocabulary=30_522,
        longer={"headless": ("optimizer.table.learning_rate_ratio=0.25",)},
    ),
}
"""A unit is 2.1 M tokens, headless, of wide ones half of that; they have 30 M parameters with a head of their own."""

ACROSS, UP = ("tokens", "time"), ("perplexity", "bits per byte", "cloze", "blimp")
VALUES = ("accuracy", *UP, *WHOLE.values(), "lambada perplexity", "hours")
GLUE_ROWS = "10000"
"""To learn from, at most: all of CoLA, MRPC, STS-B and RTE, a sixth of SST-2, a tenth of QNLI."""


def compare_verdict(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains the parts and kinds (headless, vanilla, switched) that `only` names, or all."""
    kinds = {kind for part in PARTS.values() for kind in part.kinds}
    if unknown := [name for name in only if name not in kinds and name not in PARTS]:
        raise FieldError("--only", f"name some of {', '.join([*PARTS, *sorted(kinds)])}", got=unknown[0])
    for name in [name for name in PARTS if name in only] or PARTS:
        part = PARTS[name]
        asked = [kind for kind in part.kinds if kind in only] if kinds.intersection(only) else part.kinds
        if asked:
            _compare(laboratory, name, part, asked)


def _compare(laboratory: Laboratory, name: str, part: Part, kinds: Sequence[str]) -> None:
    """Files of a comparison of some kinds are named by them, so that commands with others can run beside."""
    title = "-".join([f"verdict-{name}", *(kinds if len(kinds) < len(part.kinds) else [])])
    races = [Race(laboratory, name, part, seed, title) for seed in part.budgets]
    points = [row for race in races for row in race.points(kinds)]
    laboratory.record(title, points, *_charts(_longest(points)))
    ends = [row for row in points if row["end"]]
    values = [value for value in VALUES if all(value in row for row in ends)]
    laboratory.record(f"{title}-ends", over_seeds(ends, ("budget", "run", "tokens"), values))
    if part.encoder and laboratory.tasks_data is not None:
        _fine_tune(laboratory, title, [races[0].folder(row["curve"]) for row in _longest(ends)], laboratory.tasks_data)


def _fine_tune(laboratory: Laboratory, title: str, folders: Sequence[str], data: Path) -> None:
    """On GLUE, with more rows than the tasks' small comparisons take."""
    results = [result for folder in folders for result in fine_tuned(laboratory, folder, data, GLUE_ROWS)]
    rows = comparison_table(results)
    laboratory.record(f"{title}-glue", [{Path(name).name: cell for name, cell in row.items()} for row in rows])


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Those of the first seed's longest budget."""
    rows = [row for row in rows if row["seed"] == 0]
    return [row for row in rows if row["budget"] == max(row["budget"] for row in rows)]


def _charts(points: Sequence[Row]) -> list[Chart]:
    told = [title for title in UP if any(title in row for row in points)]
    return [
        Chart(title, across, lines([row for row in points if title in row], "curve", across, title))
        for across in ACROSS
        for title in told
    ]
