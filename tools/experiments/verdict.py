"""Headless, vanilla, or headless and then vanilla? Models that end at the same time.

- `narrow`, decoders of Pythia-14M's depth: two long runs and branches of both, of a second seed the shorter part, and
  headless once more on as many tokens as vanilla read.
- `wide`: of twice the width, both once and for a shorter time.
- `long`: both for 105 M tokens, however long they take, with lower rates: headless four and a half hours of a core.
- `level`: the same for 31.5 M tokens; `wide-level`: of twice the width, for 10.5 M and 5.2 M.
- `encoder`, ModernBERTs of four layers: the same runs as `narrow` for more tokens, but without a switch.

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

from demo_pipeline.cloze import build_cloze
from demo_pipeline.corpus import write_jsonl
from experiments.charts import Chart
from experiments.glue import fine_tuned
from experiments.laboratory import Laboratory, one_at_a_time
from experiments.measures import Row, lines, over_seeds, relative_cost, score, scores_of, spent
from experiments.recipe import KINDS
from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import FieldError
from megahead.evaluate.finetuning import comparison_table
from megahead.evaluate.results import TaskResult
from megahead.report.read import RunMetrics, read_metrics
from megahead.run_folder import RunFolder


@dataclass(frozen=True)
class Part:
    """Models of one shape."""

    shape: tuple[str, ...]
    budgets: Mapping[int, tuple[int, ...]]  # by seed; multiples of 5, so that decays begin at a unit
    # By budget: shares of the time, the last ones, in which a headless run gets a softmax over the vocabulary
    switches: Mapping[int, tuple[float, ...]]
    kinds: tuple[str, ...] = ("headless", "vanilla", "switched")
    unit: int = 128  # headless steps
    config: str = "pythia-14m-headless"
    encoder: bool = False
    vocabulary: int = 49_152
    # By objective: settings that suit runs of this length better than what a climb of short ones came to
    longer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decay: float = 0.2  # the last share of a budget, in which the learning rate falls
    vanilla_unit: int | None = None  # vanilla steps in a unit; None: as many as take the same time, which is measured


@dataclass(frozen=True)
class Course:
    """One run."""

    kind: str
    run: str  # what it is told as
    budget: int
    objective: str  # that it begins with
    steps: int
    decay_steps: int
    vanilla_steps: int = 0  # the last ones, after a switch
    trunk: str | None = None  # the name of the run that it goes on from, and at which of its steps
    fork: int = 0

    @property
    def name(self) -> str:
        return f"{self.run}-{self.budget}".replace(" ", "-").replace(",", "").replace("%", "")


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
        plain = [self._plain(kind, budget) for kind in self.units for budget in self._budgets]
        switched = [
            self._switched(budget, share) for budget in self._budgets for share in self._part.switches.get(budget, ())
        ]
        equal_tokens = [self._equal_tokens(budget) for budget in self._budgets]
        differ = "vanilla" in self._part.kinds and self.units["headless"] != self.units["vanilla"]
        runs = [*plain, *(equal_tokens if differ else []), *switched]
        return [course for course in runs if course.kind in self._part.kinds]

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

    def _equal_tokens(self, budget: int) -> Course:
        """Headless, on as many tokens as vanilla reads in the time of `budget`: cheaper than the other way round."""
        unit = self.units["vanilla"]
        steps, decay = budget * unit, round(self._part.decay * budget) * unit
        return self._branch(Course("headless", "headless, equal tokens", budget, "headless", steps, decay))

    def _branch(self, course: Course) -> Course:
        """It goes on from the trunk's last checkpoint up to where the rate or the objective changes in either, unless
        the trunk's warm-up would be most of it."""
        unit, stable = self.units[course.objective], self._longest - round(self._part.decay * self._longest)
        same = course.steps - max(course.decay_steps, course.vanilla_steps)
        fork = min(same // unit, stable) * unit
        trunk = self._plain(course.objective, self._longest).name
        return replace(course, trunk=trunk, fork=fork) if fork and 2 * unit <= course.steps else course


PROBE_STEPS = 60
# A probe's: what changes no step's cost is the same whatever a climb found
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
class Race:
    """The runs of one part and seed."""

    laboratory: Laboratory
    name: str
    part: Part
    seed: int
    title: str  # of the files with what the ends reach

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


NARROW, WIDE = (("model.hidden_size=128", "model.num_heads=4"), ("model.hidden_size=256", "model.num_heads=4"))
# Half the rates that climbs of short runs found, and a quarter for the embedding (vanilla: and for the head)
HALF = {
    "headless": ("optimizer.learning_rate=4e-3", "optimizer.table.learning_rate_ratio=1"),
    "vanilla": ("optimizer.learning_rate=8e-3", "optimizer.table.learning_rate_ratio=0.5"),
}
# A unit is 2.1 M tokens, headless, of wide ones half of that; they have 30 M parameters with a head of their own
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
ACROSS, UP = ("tokens", "time"), ("perplexity", "bits per byte", "cloze", "blimp")
VALUES = ("accuracy", *UP, *WHOLE.values(), "lambada perplexity", "hours")
GLUE_ROWS = "10000"  # to learn from, at most: all of CoLA, MRPC, STS-B and RTE, a sixth of SST-2, a tenth of QNLI


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
