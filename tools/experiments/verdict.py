"""Headless, vanilla, or headless and then vanilla? Decoders of Pythia-14M's depth that end at the same time.

`narrow`: two long runs and branches of both (`courses.py`), of a second seed the shorter part, and headless once more
on as many tokens as vanilla read. `wide`: as long, of twice the width, headless, and with a softmax in the end. Along
training: held-out bits per byte and cloze, and where --tasks-data is given BLiMP; of each end then all of BLiMP and
LAMBADA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_pipeline.cloze import build_cloze
from demo_pipeline.jsonl import write_jsonl
from experiments.charts import Chart
from experiments.courses import UNIT, Course, Courses, Part
from experiments.harness import score, scores_of
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, over_seeds, spent
from experiments.one_at_a_time import one_at_a_time
from experiments.recipe import FOUND, settings_of
from experiments.side_by_side import relative_cost
from megahead.corpus import IndexedDataset, load_tokenizer
from megahead.errors import FieldError
from megahead.evaluate.results import TaskResult
from megahead.report import RunMetrics, read_metrics
from megahead.run_folder import RunFolder

VOCABULARY = 49_152
"""Twice the width with a head of its own has 30 M parameters with it."""

CONFIG = "pythia-14m-headless"
PARTS = {
    "narrow": Part(
        shape=("model.hidden_size=128", "model.num_heads=4"),
        budgets={0: (5, 15), 1: (5,)},
        switches={5: (0.05, 0.1, 0.2, 0.4), 15: (0.2,)},
    ),
    "wide": Part(
        shape=("model.hidden_size=256", "model.num_heads=4"),
        budgets={0: (15,)},
        switches={15: (0.2,)},
        kinds=("headless", "switched"),
    ),
}
"""A unit is 2.1 M tokens, headless."""

PROBE_STEPS = 60
POINTS_EVERY = 5
"""Units from one scoring of tasks to the next."""

TASK_LIMIT = 100
"""Passages, and pairs of each paradigm, along training."""

ACROSS, UP = ("tokens", "time"), ("bits per byte", "cloze", "blimp")

WHOLE = {"blimp": "all of blimp", "lambada_openai": "lambada", "cloze": "all of cloze"}
VALUES = ("perplexity", "accuracy", *UP, *WHOLE.values(), "lambada perplexity", "hours")
OBJECTIVES = {
    name: [f'objective={{"name": "{name}"}}', "optimizer={}", *settings_of(recipe)] for name, recipe in FOUND.items()
}
"""Each with its own recipe, and nothing of the config's."""


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
    points = [row for seed in part.budgets for row in Race(laboratory, name, seed, title).points(kinds)]
    laboratory.record(title, points, *_charts([row for row in points if row["seed"] == 0]))
    ends = [row for row in points if row["end"]]
    values = [value for value in VALUES if all(value in row for row in ends)]
    laboratory.record(f"{title}-ends", over_seeds(ends, ("budget", "run", "tokens"), values))


def _charts(points: Sequence[Row]) -> list[Chart]:
    """Of the longest runs."""
    points = [row for row in points if row["budget"] == max(row["budget"] for row in points)]
    told = [title for title in UP if any(title in row for row in points)]
    return [
        Chart(title, across, lines([row for row in points if title in row], "curve", across, title))
        for across in ACROSS
        for title in told
    ]


@dataclass(frozen=True)
class Race:
    """The runs of one part and seed."""

    laboratory: Laboratory
    part: str
    seed: int
    title: str
    """Of the files with what the ends reach."""

    def points(self, kinds: Sequence[str]) -> list[Row]:
        """A row for each evaluation of each run."""
        data = self.laboratory.data(VOCABULARY)
        courses = Courses(PARTS[self.part], self.seed, self._vanilla_unit(data))
        asked = [course for course in courses.all() if course.kind in kinds]
        for trunk in courses.trunks():
            if any(course.trunk == trunk.name for course in asked):
                self._train(courses, trunk, data)
        rows = [row for course in asked for row in self._rows(courses, course, data)]
        tasks = self.laboratory.tasks_data
        return rows if tasks is None else self._scored(rows, tasks, _cloze(data))

    def _vanilla_unit(self, data: Sequence[str]) -> int:
        """Vanilla steps in the time of UNIT headless ones."""

        probes = {f"{self.part}-probe-{objective}": given for objective, given in OBJECTIVES.items()}

        def train(laboratory: Laboratory, run: str) -> RunMetrics:
            course = f"training.steps={PROBE_STEPS}", "schedule.warmup_steps=1"
            return laboratory.train(CONFIG, run, *data, *PARTS[self.part].shape, *probes[run], *course)

        headless, vanilla = probes
        return max(1, round(UNIT / relative_cost(self.laboratory, train, vanilla, headless)))

    def _rows(self, courses: Courses, course: Course, data: Sequence[str]) -> list[Row]:
        run = self._train(courses, course, data)
        scored = {record["step"]: record["tasks"] for record in run.tasks}
        return [
            {
                **{"run": course.run, "seed": self.seed, "budget": course.budget, "curve": course.name},
                **{"time": courses.time_until(course, record["step"]), "end": record["step"] == course.steps},
                "hours": self._hours(course, run),
                **_scores(record, scored.get(record["step"], {})),
            }
            for record in run.validation
        ]

    def _hours(self, course: Course, run: RunMetrics) -> float:
        """CPU hours of the whole run, with those of the one that it went on from."""
        whole = spent(run)
        if course.trunk is not None:
            whole += spent(read_metrics(self.laboratory.folder / self._folder(course.trunk)), until=course.fork)
        return whole / 3600

    def _folder(self, name: str) -> str:
        return f"{self.part}-{self.seed}-{name}"

    def _train(self, courses: Courses, course: Course, data: Sequence[str]) -> RunMetrics:
        unit = courses.units[course.objective]
        training = {"steps": course.steps, "evaluate_every": unit, "checkpoint_every": unit}
        training |= {"keep_every": kept} if (kept := courses.kept_every(course)) else {}
        given = [f"training.{key}={value}" for key, value in training.items()]
        given += ["schedule.name=wsd", f"schedule.warmup_steps={courses.warmup_steps(course)}"]
        given += [f"schedule.decay_steps={course.decay_steps}"]
        given += [f"seed={self.seed}", f"tasks={json.dumps(self._tasks(unit, data))}"]
        if course.vanilla_steps:
            given.append(f"objective.schedule.vanilla_share={course.vanilla_steps / course.steps}")
            given.append("objective.tied=true")  # a matrix of its own went wrong at such rates
        if course.trunk is not None:
            given.append("resume.allow=[objective.schedule,objective.tied,schedule.decay_steps]")
        given = [*data, *PARTS[self.part].shape, *OBJECTIVES[course.objective], *given]
        return self.laboratory.train(CONFIG, self._folder(course.name), *given, fork=self._fork(course))

    def _fork(self, course: Course) -> Path | None:
        """The checkpoint that a branch goes on from."""
        if course.trunk is None:
            return None
        return RunFolder(self.laboratory.folder / self._folder(course.trunk)).checkpoints / f"step-{course.fork:08d}"

    def _tasks(self, unit: int, data: Sequence[str]) -> Row:
        tasks: Row = {"names": ["cloze"], "cloze": str(_cloze(data)), "every": POINTS_EVERY * unit}
        tasks["limit"] = TASK_LIMIT
        if self.laboratory.tasks_data is not None:
            tasks |= {"names": ["cloze", "blimp"], "data": str(self.laboratory.tasks_data)}
        return tasks

    def _scored(self, rows: Sequence[Row], data: Path, cloze: Path) -> list[Row]:
        """With what the ends reach on whole tasks, and their standard errors."""
        folders = [self.laboratory.folder / self._folder(row["curve"]) for row in rows if row["end"]]
        found = score(self.laboratory, f"{self.title}-tasks", ",".join(WHOLE), None, data, folders, cloze)
        reached = {model.name: _whole(results) for model, results in found.items()}
        return [row | (reached[self._folder(row["curve"])] if row["end"] else {}) for row in rows]


def _whole(results: Sequence[TaskResult]) -> Row:
    row: Row = {}
    for result in results:
        scores, title = scores_of(result), WHOLE[result.task]
        row |= {title: scores["acc"], f"{title} ±": scores["± acc"]}
        if "perplexity" in scores:
            row[f"{title} perplexity"] = scores["perplexity"]
    return row


def _cloze(data: Sequence[str]) -> Path:
    """Passages of the held-out text whose last word is to be named; made once."""
    named = dict(one.split("=", 1) for one in data)
    output = Path(named["data.validation"]).with_name("cloze.jsonl")
    with one_at_a_time(output):
        if not output.exists():
            dataset, tokenizer = IndexedDataset(named["data.validation"]), load_tokenizer(Path(named["data.tokenizer"]))
            documents = output.with_name("held-out.jsonl")
            write_jsonl(documents, ({"text": tokenizer.decode(dataset[index])} for index in range(len(dataset))))
            build_cloze(documents, output)
    return output


def _scores(record: Mapping[str, float], tasks: Mapping[str, Row]) -> Row:
    row: Row = {"step": record["step"], "tokens": record["tokens"], "perplexity": record["perplexity"]}
    row |= {"accuracy": record["accuracy"], "bits per byte": record["bits_per_byte"]}
    return row | {task: tasks[task]["acc"]["value"] for task in tasks}
