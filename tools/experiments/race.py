"""The runs of a verdict: trained with what each needs of the others, and scored along their way and at their ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_pipeline.cloze import build_cloze
from demo_pipeline.jsonl import write_jsonl
from experiments.courses import Course, Courses, Part
from experiments.harness import score, scores_of
from experiments.laboratory import Laboratory
from experiments.measures import Row, spent
from experiments.one_at_a_time import one_at_a_time
from experiments.recipe import KINDS
from experiments.side_by_side import relative_cost
from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.evaluate.results import TaskResult
from megahead.report.read import RunMetrics, read_metrics
from megahead.run_folder import RunFolder

PROBE_STEPS = 60
BRIEF = (
    *("schedule.name=cosine", "schedule.decay_steps=null", "schedule.warmup_steps=1"),
    *("optimizer.learning_rate=1e-3", "optimizer.table.learning_rate_ratio=1", "model.init_embedding_std=0.02"),
    *("optimizer.weight_decay=0.1", "optimizer.betas=[0.9,0.98]"),
)
"""A probe's: what changes no step's cost is the same whatever a climb found."""

POINTS_EVERY = 5
"""Units from one scoring of tasks to the next."""

TASK_LIMIT = 100
"""Passages, and pairs of each paradigm, along training."""

WHOLE = {"blimp": "all of blimp", "lambada_openai": "lambada", "cloze": "all of cloze"}
"""What ends are scored by; encoders by BLiMP alone."""


@dataclass(frozen=True)
class Race:
    """The runs of one part and seed."""

    laboratory: Laboratory
    name: str
    part: Part
    seed: int
    title: str
    """Of the files with what the ends reach."""

    def points(self, kinds: Sequence[str]) -> list[Row]:
        """A row for each evaluation of each run."""
        data = self._data()
        courses = Courses(self.part, self.seed, self._vanilla_unit(data))
        asked = [course for course in courses.all() if course.kind in kinds]
        for trunk in courses.trunks():
            if any(course.trunk == trunk.name for course in asked):
                self._train(courses, trunk, data)
        rows = [row for course in asked for row in self._rows(courses, course, data)]
        tasks = self.laboratory.tasks_data
        return rows if tasks is None else self._scored(rows, tasks, data)

    def folder(self, name: str) -> str:
        """Of the laboratory, where a course of that name lies."""
        return f"{self.name}-{self.seed}-{name}"

    def _data(self) -> list[str]:
        """The settings that name the text."""
        cut = self.laboratory.encoder_data if self.part.encoder else self.laboratory.data
        return cut(self.part.vocabulary)

    def _learns_by(self, objective: str) -> list[str]:
        """An objective with its own recipe, and nothing else of the config's; encoders have BERT's head."""
        kind = KINDS["encoder" if self.part.encoder else "decoder"]
        side = "tied" if self.part.encoder and objective == "vanilla" else objective
        return [*kind.learns_by(side, kind.found[side]), *self.part.longer.get(objective, ())]

    def _vanilla_unit(self, data: Sequence[str]) -> int:
        """Vanilla steps in a unit: the part's number, else those in the same time; 1 where nothing asks for it."""
        if self.part.vanilla_unit is not None or self.part.kinds == ("headless",):
            return self.part.vanilla_unit or 1
        probes = {f"{self.name}-probe-{objective}": self._learns_by(objective) for objective in ("headless", "vanilla")}

        def train(laboratory: Laboratory, run: str) -> RunMetrics:
            course = f"training.steps={PROBE_STEPS}", *BRIEF
            return laboratory.train(self.part.config, run, *data, *self.part.shape, *probes[run], *course)

        headless, vanilla = probes
        return max(1, round(self.part.unit / relative_cost(self.laboratory, train, vanilla, headless)))

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
        """CPU hours of the whole run on all ranks, with those of the one that it went on from."""
        whole = spent(run)
        if course.trunk is not None:
            whole += spent(read_metrics(self.laboratory.folder / self.folder(course.trunk)), until=course.fork)
        return whole * self.laboratory.ranks / 3600

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
        given = [*data, *self.part.shape, *self._learns_by(course.objective), *given]
        return self.laboratory.train(self.part.config, self.folder(course.name), *given, fork=self._fork(course))

    def _fork(self, course: Course) -> Path | None:
        """The checkpoint that a branch goes on from."""
        if course.trunk is None:
            return None
        return RunFolder(self.laboratory.folder / self.folder(course.trunk)).checkpoints / f"step-{course.fork:08d}"

    def _tasks(self, unit: int, data: Sequence[str]) -> Row | None:
        """Those along training: a cloze of the held-out text, for decoders, and BLiMP where it is given."""
        tasks: Row = {"names": [], "every": POINTS_EVERY * unit, "limit": TASK_LIMIT}
        if not self.part.encoder:
            tasks |= {"names": ["cloze"], "cloze": str(_cloze(data))}
        if self.laboratory.tasks_data is not None:
            tasks |= {"names": [*tasks["names"], "blimp"], "data": str(self.laboratory.tasks_data)}
        return tasks if tasks["names"] else None

    def _scored(self, rows: Sequence[Row], tasks: Path, data: Sequence[str]) -> list[Row]:
        """With what the ends reach on whole tasks, and their standard errors."""
        folders = [self.laboratory.folder / self.folder(row["curve"]) for row in rows if row["end"]]
        asked, cloze = ("blimp", None) if self.part.encoder else (",".join(WHOLE), _cloze(data))
        found = score(self.laboratory, f"{self.title}-tasks", asked, None, tasks, folders, cloze)
        reached = {model.name: _whole(results) for model, results in found.items()}
        return [row | (reached[self.folder(row["curve"])] if row["end"] else {}) for row in rows]


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
    told = {name: value for name, value in row.items() if value is not None}  # an encoder has no bits per byte
    return told | {task: tasks[task]["acc"]["value"] for task in tasks}
