"""Headless, vanilla, or headless and then vanilla? Models that end at the same time.

`verdict` in grids.yaml has its parts.

A long run by each objective is a trunk; branches end where a smaller budget is spent. By a warmup-stable-decay schedule
the learning rate falls in the last part of a budget alone, so that all budgets share one run up to there: a branch goes
on from its checkpoint. Budgets are units of time: headless steps, and as many vanilla ones as take as long.

Along training: held-out perplexity, a cloze (decoders), and where --tasks-data is given BLiMP; of each end then all of
BLiMP and LAMBADA, of encoders BLiMP and, of the longest runs, GLUE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path

from demo_pipeline.corpus import build_cloze, write_jsonl
from experiments.encoders import fine_tuned, table_of
from experiments.measures import Row, over_seeds, scores, spent
from experiments.recipe import KINDS
from experiments.runner import GRIDS, ExperimentRunner, run_name, scores_of, settings_of
from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import FieldError
from megahead.report.read import RunMetrics, read_metrics
from megahead.run_folder import RunFolder
from steps.once import output_lock


@dataclass(frozen=True)
class Part:
    """Models of one shape."""

    shape: Sequence[str]
    budgets: Mapping[int, Sequence[int]]  # by seed; multiples of 5, so that decays begin at a unit
    # By budget: shares of the time, the last ones, in which a headless run gets a softmax over the vocabulary
    switches: Mapping[int, Sequence[float]] = field(default_factory=dict)
    kinds: Sequence[str] = ("headless", "vanilla")
    unit: int = 128  # headless steps
    config: str = "pythia-14m-headless"
    encoder: bool = False
    vocabulary: int = 49_152
    # By objective: settings that suit runs of this length better than what a search of short ones came to
    longer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    decay: float = 0.2  # the last share of a budget, in which the learning rate falls
    vanilla_unit: int | None = None  # vanilla steps in a unit; None: as many as take the same time, which is measured


@dataclass(frozen=True)
class Course:
    """One run."""

    kind: str
    run: str  # its name in tables
    budget: int
    objective: str  # that it begins with
    steps: int
    decay_steps: int
    vanilla_steps: int = 0  # the last ones, after a switch
    trunk: str | None = None  # the name of the run that it goes on from, and at which of its steps
    fork: int = 0

    @property
    def name(self) -> str:
        return run_name(f"{self.run}-{self.budget}")


class Courses:
    """Of one part and seed, where `vanilla_unit` vanilla steps take as long as a unit of headless ones."""

    def __init__(self, part: Part, seed: int, vanilla_unit: int) -> None:
        self.units = {"headless": part.unit, "vanilla": vanilla_unit}
        self._part, self._budgets, self._longest = part, part.budgets[seed], max(part.budgets[seed])

    def trunks(self) -> list[Course]:
        """The longest one of each objective: others go on from it."""
        return [self._plain(kind, self._longest) for kind in self.units]

    def all(self) -> list[Course]:
        """All runs, but for the kinds that the part leaves out."""
        part, unit = self._part, self.units["vanilla"]
        runs = [self._plain(kind, budget) for kind in self.units for budget in self._budgets]
        if "vanilla" in part.kinds and self.units["headless"] != unit:
            for (
                budget
            ) in self._budgets:  # headless, on as many tokens as vanilla reads then: cheaper than the other way
                steps, decay = budget * unit, round(part.decay * budget) * unit
                course = Course("headless", "headless, equal tokens", budget, "headless", steps, decay)
                runs.append(self._branch(course))
        runs += [self._switched(budget, share) for budget in self._budgets for share in part.switches.get(budget, ())]
        return [course for course in runs if course.kind in part.kinds]

    def kept_every(self, trunk: Course) -> int:
        """Steps between those checkpoints of a trunk that others go on from; 0 if none does."""
        return gcd(*(course.fork for course in self.all() if course.trunk == trunk.name))

    def warmup_steps(self, course: Course) -> int:
        """A unit of its trunk's, or a fifth of a run that is shorter than five."""
        unit = self.units[course.objective]
        return unit if course.trunk is not None else min(unit, course.steps // 5)

    def time_until(self, course: Course, step: int) -> float:
        """Units that a course has taken at one of its steps."""
        last = max(0, step - (course.steps - course.vanilla_steps))
        return (step - last) / self.units[course.objective] + last / self.units["vanilla"]

    def _plain(self, kind: str, budget: int) -> Course:
        unit, decay = self.units[kind], round(self._part.decay * budget)
        course = Course(kind, kind, budget, kind, steps=budget * unit, decay_steps=decay * unit)
        return course if budget == self._longest else self._branch(course)

    def _switched(self, budget: int, share: float) -> Course:
        unit = self.units["headless"]
        first, last = round(budget * (1 - share) * unit), max(1, round(budget * share * self.units["vanilla"]))
        falls = self._part.decay
        decay = round(last * falls / share) if share >= falls else last + round(budget * (falls - share) * unit)
        run = f"vanilla for the last {share:.0%}"
        return self._branch(Course("switched", run, budget, "headless", first + last, decay, vanilla_steps=last))

    def _branch(self, course: Course) -> Course:
        """It goes on from the trunk's last checkpoint up to where the rate or the objective changes in either, unless
        the trunk's warm-up would be most of it."""
        unit, stable = self.units[course.objective], self._longest - round(self._part.decay * self._longest)
        same = course.steps - max(course.decay_steps, course.vanilla_steps)
        fork = min(same // unit, stable) * unit
        trunk = self._plain(course.objective, self._longest).name
        return replace(course, trunk=trunk, fork=fork) if fork and 2 * unit <= course.steps else course


PROBE_STEPS = 60
# A probe's: what changes no step's cost is the same whatever a search found
BRIEF = (
    *("schedule.name=cosine", "schedule.decay_steps=null", "schedule.warmup_steps=1"),
    *("optimizer.learning_rate=1e-3", "optimizer.table.learning_rate_ratio=1", "model.init_embedding_std=0.02"),
    *("optimizer.weight_decay=0.1", "optimizer.betas=[0.9,0.98]"),
)
POINTS_EVERY = 5  # units from one scoring of tasks to the next
TASK_LIMIT = 100  # passages, and pairs of each paradigm, along training
# What ends are scored by; encoders by BLiMP alone
WHOLE = {"blimp": "all of blimp", "lambada_openai": "lambada", "cloze": "all of cloze"}


@dataclass(frozen=True)
class Comparison:
    """The runs of one part and seed."""

    runner: ExperimentRunner
    name: str
    part: Part
    seed: int
    title: str  # of the files with what the ends reach

    def points(self, kinds: Sequence[str]) -> list[Row]:
        """A row for each evaluation of each run."""
        data = self.runner.data(self.part.vocabulary, encoder=self.part.encoder)
        courses = Courses(self.part, self.seed, self._vanilla_unit(data))
        asked = [course for course in courses.all() if course.kind in kinds]
        for trunk in courses.trunks():
            if any(course.trunk == trunk.name for course in asked):
                self._train(courses, trunk, data)
        rows = [row for course in asked for row in self._rows(courses, course, data)]
        tasks = self.runner.tasks_data
        return rows if tasks is None else self._scored(rows, tasks, data)

    def folder(self, name: str) -> str:
        """Of the run of a course."""
        return f"{self.name}-{self.seed}-{name}"

    def _learns_by(self, objective: str) -> list[str]:
        """An objective with its own recipe, and nothing else of the config's; encoders have BERT's head."""
        kind = KINDS["encoder" if self.part.encoder else "decoder"]
        side = "tied" if self.part.encoder and objective == "vanilla" else objective
        return [*kind.learns_by(side, kind.found[side]), *self.part.longer.get(objective, ())]

    def _vanilla_unit(self, data: Sequence[str]) -> int:
        """Vanilla steps in a unit: the part's number, else those in the same time; 1 where nothing asks for it."""
        if self.part.vanilla_unit is not None or list(self.part.kinds) == ["headless"]:
            return self.part.vanilla_unit or 1
        given = [*data, *self.part.shape]
        brief = [f"training.steps={PROBE_STEPS}", *BRIEF]
        probes = {
            f"{self.name}-probe-{objective}": [*given, *self._learns_by(objective), *brief]
            for objective in ("vanilla", "headless")
        }
        return max(1, round(self.part.unit / self.runner.relative_cost(self.part.config, probes)))

    def _rows(self, courses: Courses, course: Course, data: Sequence[str]) -> list[Row]:
        run = self._train(courses, course, data)
        seconds = spent(run)  # with those of the run that it went on from
        if course.trunk is not None:
            seconds += spent(read_metrics(self.runner.folder / self.folder(course.trunk)), until=course.fork)
        tasks = {record["step"]: record["tasks"] for record in run.tasks}
        rows: list[Row] = []
        for record in run.validation:
            step, tokens = record["step"], record["tokens"]
            row: Row = {"run": course.run, "seed": self.seed, "budget": course.budget, "curve": course.name}
            row |= {"time": courses.time_until(course, step), "end": step == course.steps}
            row |= {"hours": seconds * self.runner.ranks / 3600, "step": step, "tokens": tokens}  # hours of CPUs
            found = tasks.get(step, {})
            rows.append(row | scores(record) | {task: found[task]["acc"]["value"] for task in found})
        return rows

    def _train(self, courses: Courses, course: Course, data: Sequence[str]) -> RunMetrics:
        unit = courses.units[course.objective]
        given: Row = {"training.steps": course.steps}
        given |= dict.fromkeys(("training.evaluate_every", "training.checkpoint_every"), unit)
        given |= {"training.keep_every": kept} if (kept := courses.kept_every(course)) else {}
        given |= {"schedule.name": "wsd", "schedule.warmup_steps": courses.warmup_steps(course)}
        given |= {"schedule.decay_steps": course.decay_steps, "seed": self.seed}
        given |= {"tasks": json.dumps(self._tasks(unit, data))}
        if course.vanilla_steps:  # a matrix of its own went wrong at such rates
            share = course.vanilla_steps / course.steps
            given |= {"objective.schedule.vanilla_share": share, "objective.tied": "true"}
        fork = None
        if course.trunk is not None:
            given["resume.allow"] = "[objective.schedule,objective.tied,schedule.decay_steps]"
            trunk = RunFolder(self.runner.folder / self.folder(course.trunk))
            fork = trunk.checkpoints / f"step-{course.fork:08d}"
        settings = [*data, *self.part.shape, *self._learns_by(course.objective), *settings_of(given)]
        return self.runner.train(self.part.config, self.folder(course.name), *settings, fork=fork)

    def _tasks(self, unit: int, data: Sequence[str]) -> Row | None:
        """Those along training: a cloze of the held-out text, for decoders, and BLiMP where it is given."""
        tasks: Row = {"names": [], "every": POINTS_EVERY * unit, "limit": TASK_LIMIT}
        if not self.part.encoder:
            tasks |= {"names": ["cloze"], "cloze": str(_cloze(data))}
        if self.runner.tasks_data is not None:
            tasks |= {"names": [*tasks["names"], "blimp"], "data": str(self.runner.tasks_data)}
        return tasks if tasks["names"] else None

    def _scored(self, rows: Sequence[Row], tasks: Path, data: Sequence[str]) -> list[Row]:
        """With what the ends reach on whole tasks, and their standard errors."""
        folders = [self.runner.folder / self.folder(row["curve"]) for row in rows if row["end"]]
        asked, cloze = ("blimp", None) if self.part.encoder else (",".join(WHOLE), _cloze(data))
        found = self.runner.score(f"{self.title}-tasks", asked, None, tasks, folders, cloze)
        reached: dict[str, Row] = {}
        for model, results in found.items():
            row = reached.setdefault(model.name, {})
            for result in results:
                of_task, title = scores_of(result), WHOLE[result.task]
                row |= {title: of_task["acc"], f"{title} ±": of_task["± acc"]}
                if "perplexity" in of_task:
                    row[f"{title} perplexity"] = of_task["perplexity"]
        return [row | (reached[self.folder(row["curve"])] if row["end"] else {}) for row in rows]


def _cloze(data: Sequence[str]) -> Path:
    """Passages of the held-out text whose last word is to be named; made once."""
    named = dict(one.split("=", 1) for one in data)
    output = Path(named["data.validation"]).with_name("cloze.jsonl")
    with output_lock(output):
        if not output.exists():
            dataset, tokenizer = IndexedDataset(named["data.validation"]), load_tokenizer(Path(named["data.tokenizer"]))
            documents = output.with_name("held-out.jsonl")
            write_jsonl(documents, ({"text": tokenizer.decode(dataset[index])} for index in range(len(dataset))))
            build_cloze(documents, output)
    return output


PARTS = {name: Part(**{"shape": KINDS["encoder"].shape, **part}) for name, part in GRIDS["verdict"].items()}
VALUES = ("accuracy", "perplexity", "bits per byte", "cloze", "blimp", *WHOLE.values(), "lambada perplexity", "hours")
GLUE_ROWS = "10000"  # to learn from, at most: all of CoLA, MRPC, STS-B and RTE, a sixth of SST-2, a tenth of QNLI


def compare_verdict(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains the parts and kinds (headless, vanilla, switched) that `only` names, or all."""
    kinds = {kind for part in PARTS.values() for kind in part.kinds}
    if unknown := [name for name in only if name not in kinds and name not in PARTS]:
        raise FieldError("--only", f"name some of {', '.join([*PARTS, *sorted(kinds)])}", got=unknown[0])
    for name in [name for name in PARTS if name in only] or PARTS:
        part = PARTS[name]
        asked = [kind for kind in part.kinds if kind in only] if kinds.intersection(only) else part.kinds
        if asked:
            _compare(runner, name, part, asked)


def _compare(runner: ExperimentRunner, name: str, part: Part, kinds: Sequence[str]) -> None:
    """Files of a comparison of some kinds are named by them, so that commands with others can run beside."""
    title = "-".join([f"verdict-{name}", *(kinds if len(kinds) < len(part.kinds) else [])])
    comparisons = [Comparison(runner, name, part, seed, title) for seed in part.budgets]
    points = [row for comparison in comparisons for row in comparison.points(kinds)]
    runner.record(title, points)
    ends = [row for row in points if row["end"]]
    values = [value for value in VALUES if all(value in row for row in ends)]
    runner.record(f"{title}-ends", over_seeds(ends, ("budget", "run", "tokens"), values))
    if part.encoder and runner.tasks_data is not None:
        longest = (0, max(part.budgets[0]))  # of the first seed
        runs = [comparisons[0].folder(row["curve"]) for row in ends if (row["seed"], row["budget"]) == longest]
        results = [one for run in runs for one in fine_tuned(runner, run, runner.tasks_data, GLUE_ROWS)]
        runner.record(f"{title}-glue", table_of(results))
