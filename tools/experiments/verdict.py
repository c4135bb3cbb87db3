"""Headless, vanilla, or headless and then vanilla? Decoders of Pythia-14M's depth that end at the same time.

A headless run reads so many tokens; the others get the time that these took, each share of it as many steps as fit by
the speeds of short runs. `short`: two seeds, several switches, and vanilla once more at equal tokens. `long`: ten times
as long, of the first seed. `wide`: as long, of twice the width, headless alone. Along training: held-out bits per byte,
and where --tasks-data is given BLiMP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo_pipeline.cloze import build_cloze
from demo_pipeline.jsonl import write_jsonl
from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, over_seeds, speed
from megahead.corpus import IndexedDataset, load_tokenizer
from megahead.report import RunMetrics

VOCABULARY = 50_176
STEPS = {"short": 640, "long": 6_400, "wide": 6_400}
"""Of headless runs: 10.5 M and 105 M tokens."""

SEEDS = {"short": (0, 1), "long": (0,), "wide": (0,)}
SWITCHES = {"short": (0.05, 0.1, 0.2, 0.4), "long": (0.2,), "wide": ()}
"""Shares of the time, the last ones, with a softmax over the vocabulary."""

SHAPES = {"short": ("hidden_size=128", "num_heads=4"), "long": ("hidden_size=128", "num_heads=4")}
SHAPES["wide"] = ("hidden_size=256", "num_heads=4")
SPEED_STEPS = 8
POINTS = 20
TASK_LIMIT = 100
"""Passages, and pairs of each paradigm, along training."""

ACROSS, UP = ("tokens", "minutes"), ("bits per byte", "cloze", "blimp")

HEADLESS = ("optimizer.learning_rate=8e-3",)
VANILLA = ("objective.name=vanilla", "optimizer.learning_rate=4e-3")
"""Each objective's own best, by `recipe`."""


def compare_verdict(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains what `short`, `long` and `wide` say, or those of `only`."""
    for part in (part for part in STEPS if not only or part in only):
        points = [row for seed in SEEDS[part] for row in Race(laboratory, part, seed).points()]
        charts = [
            Chart(title, across, lines([row for row in points if title in row], "run", across, title))
            for across in ACROSS
            for title in UP
            if any(title in row for row in points)
        ]
        laboratory.record(f"verdict-{part}", points, *charts)
        ends = [row for row in points if row["end"]]
        values = [name for name in ("minutes", "perplexity", "accuracy", *UP) if name in ends[0]]
        laboratory.record(f"verdict-{part}-ends", over_seeds(ends, ("run", "tokens"), values))


class Race:
    """The runs of one part and seed, which end at the same time."""

    def __init__(self, laboratory: Laboratory, part: str, seed: int) -> None:
        self.laboratory, self.part, self.seed = laboratory, part, seed
        self.data = laboratory.data(VOCABULARY)
        self.cloze = _cloze(laboratory, self.data)

    def points(self) -> list[Row]:
        """A row for each evaluation of each run."""
        steps = STEPS[self.part]
        rows = self._run("headless", steps, HEADLESS)
        if SWITCHES[self.part]:
            rows += self._run("vanilla", self._fitting(steps, 1), VANILLA)
        for share in SWITCHES[self.part]:
            first, last = round(steps * (1 - share)), self._fitting(steps, share)
            switch = [*HEADLESS, f"objective.schedule.vanilla_share={last / (first + last)}"]
            rows += self._run(f"vanilla for the last {share:.0%}", first + last, switch)
        if self.part == "short":
            rows += self._run("vanilla, equal tokens", steps, VANILLA)
        return rows

    def _fitting(self, steps: int, share: float) -> int:
        """Vanilla steps that take a share of the time of `steps` headless ones."""
        settings = {"headless": HEADLESS, "vanilla": VANILLA}
        speeds = {name: speed(self._train(f"speed {name}", SPEED_STEPS, settings[name])) for name in settings}
        return max(1, round(steps * share * speeds["vanilla"] / speeds["headless"]))

    def _run(self, name: str, steps: int, settings: Sequence[str]) -> list[Row]:
        tasks = {"names": ["cloze"], "cloze": str(self.cloze), "every": max(1, steps // POINTS), "limit": TASK_LIMIT}
        if self.laboratory.tasks_data is not None:
            tasks |= {"names": ["cloze", "blimp"], "data": str(self.laboratory.tasks_data)}
        run = self._train(name, steps, [*settings, f"tasks={json.dumps(tasks)}"])
        scored = {record["step"]: record["tasks"] for record in run.tasks}
        return [_row(name, record, scored.get(record["step"], {}), steps) for record in run.validation]

    def _train(self, name: str, steps: int, settings: Sequence[str]) -> RunMetrics:
        every = max(1, steps // POINTS)
        course = {"steps": steps, "evaluate_every": every, "checkpoint_every": every, "keep_checkpoints": 2}
        given = [f"training.{key}={value}" for key, value in course.items()]
        given += [f"schedule.warmup_steps={max(1, steps // 20)}", f"seed={self.seed}"]
        given += [f"model.{one}" for one in SHAPES[self.part]]
        folder = f"{self.part}-{self.seed}-{name}".replace(" ", "-").replace(",", "").replace("%", "")
        return self.laboratory.train("pythia-14m-headless", folder, *self.data, *given, *settings)


def _cloze(laboratory: Laboratory, data: Sequence[str]) -> Path:
    """Passages of the held-out text whose last word is to be named; made once."""
    named = dict(one.split("=", 1) for one in data)
    output = Path(named["data.validation"]).with_name("cloze.jsonl")
    if not output.exists():
        dataset, tokenizer = IndexedDataset(named["data.validation"]), load_tokenizer(Path(named["data.tokenizer"]))
        documents = output.with_name("held-out.jsonl")
        write_jsonl(documents, ({"text": tokenizer.decode(dataset[index])} for index in range(len(dataset))))
        build_cloze(documents, output)
    return output


def _row(name: str, record: Mapping[str, float], tasks: Mapping[str, Row], last: int) -> Row:
    row: Row = {"run": name, "end": record["step"] == last, "step": record["step"], "tokens": record["tokens"]}
    row |= {"minutes": record["seconds"] / 60, "perplexity": record["perplexity"], "accuracy": record["accuracy"]}
    return row | {"bits per byte": record["bits_per_byte"], **{task: tasks[task]["acc"]["value"] for task in tasks}}
