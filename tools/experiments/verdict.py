"""Compares headless, vanilla, and headless then vanilla training, at equal time. Parts: `verdict` in grids.yaml.

The longest run of each objective is a trunk; branches have smaller budgets. With a warmup-stable-decay schedule the
learning rate decays only in the last part of a budget, so that runs of all budgets share the steps before: a branch
starts from a checkpoint of the trunk. Budgets are in units of time: headless steps, and as many vanilla ones as take
equally long.

During training: held-out perplexity, a cloze test (decoders), and with --tasks-data BLiMP. At the end of each run: all
of BLiMP and LAMBADA; for encoders BLiMP and, for the longest runs, GLUE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path

from demo_pipeline.corpus import build_cloze, write_jsonl
from experiments.encoders import fine_tune_on_glue, task_table
from experiments.measures import Row, aggregate_seeds, evaluation_scores, time_spent
from experiments.recipe import KINDS
from experiments.runner import GRIDS, ExperimentRunner, run_name, select_names, task_scores, to_overrides
from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.report.read import RunMetrics, read_metrics
from megahead.run_folder import RunFolder
from steps.once import output_lock


@dataclass(frozen=True)
class Part:
    """Models of one shape."""

    shape: Sequence[str]
    budgets: Mapping[int, Sequence[int]]  # by seed; multiples of 5, so that decays start at a unit
    # By budget: shares of the time, at its end, in which a run that began headless trains a full softmax
    switches: Mapping[int, Sequence[float]] = field(default_factory=dict)
    kinds: Sequence[str] = ("headless", "vanilla")
    unit: int = 128  # headless steps
    config: str = "pythia-14m-headless"
    encoder: bool = False
    vocabulary: int = 49_152
    # By objective: settings better for long runs than those found by a search with short ones
    long_run_settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    decay: float = 0.2  # final share of a budget in which the learning rate decays
    vanilla_unit: int | None = None  # vanilla steps in a unit; None: measured, to take the same time


@dataclass(frozen=True)
class PlannedRun:
    """The plan of one run."""

    kind: str  # headless, vanilla, or switched (headless, then vanilla)
    run: str  # title in tables
    budget: int
    objective: str  # at the start
    steps: int
    decay_steps: int
    vanilla_steps: int = 0  # after a switch
    trunk: str | None = None  # the name of the run that it branches off, at step `fork`
    fork: int = 0

    @property
    def name(self) -> str:
        return run_name(f"{self.run}-{self.budget}")


class RunPlanner:
    """Plans the runs of a part and seed, where `vanilla_unit` vanilla steps take as long as a unit of headless ones."""

    def __init__(self, part: Part, seed: int, vanilla_unit: int) -> None:
        self.units = {"headless": part.unit, "vanilla": vanilla_unit}
        self._part, self._budgets, self._longest = part, part.budgets[seed], max(part.budgets[seed])

    def trunks(self) -> list[PlannedRun]:
        """The longest run of each objective, from which others branch off."""
        return [self._plan_run(kind, self._longest) for kind in self.units]

    def all(self) -> list[PlannedRun]:
        """All runs of the part's kinds."""
        part, unit = self._part, self.units["vanilla"]
        runs = [self._plan_run(kind, budget) for kind in self.units for budget in self._budgets]
        if "vanilla" in part.kinds and self.units["headless"] != unit:
            for budget in self._budgets:  # headless on as many tokens as vanilla, which costs less than the reverse
                steps, decay = budget * unit, round(part.decay * budget) * unit
                planned = PlannedRun("headless", "headless, equal tokens", budget, "headless", steps, decay)
                runs.append(self._branch_off(planned))
        runs += [self._plan_switched_run(n, share) for n in self._budgets for share in part.switches.get(n, ())]
        return [planned for planned in runs if planned.kind in part.kinds]

    def keep_every(self, trunk: PlannedRun) -> int:
        """Steps between the checkpoints of a trunk that branches need; 0 if there are none."""
        return gcd(*(planned.fork for planned in self.all() if planned.trunk == trunk.name))

    def warmup_steps(self, planned: PlannedRun) -> int:
        """One unit; at most a fifth of a run that is not a branch."""
        unit = self.units[planned.objective]
        return unit if planned.trunk is not None else min(unit, planned.steps // 5)

    def units_at_step(self, planned: PlannedRun, step: int) -> float:
        """Time in units at a step of a run."""
        vanilla_steps = max(0, step - (planned.steps - planned.vanilla_steps))
        return (step - vanilla_steps) / self.units[planned.objective] + vanilla_steps / self.units["vanilla"]

    def _plan_run(self, kind: str, budget: int) -> PlannedRun:
        unit, decay = self.units[kind], round(self._part.decay * budget)
        planned = PlannedRun(kind, kind, budget, kind, steps=budget * unit, decay_steps=decay * unit)
        return planned if budget == self._longest else self._branch_off(planned)

    def _plan_switched_run(self, budget: int, share: float) -> PlannedRun:
        unit, decay_share = self.units["headless"], self._part.decay
        vanilla_steps = max(1, round(budget * share * self.units["vanilla"]))
        decay = round(vanilla_steps * decay_share / share)
        if share < decay_share:
            decay = vanilla_steps + round(budget * (decay_share - share) * unit)
        run, steps = f"vanilla for the last {share:.0%}", round(budget * (1 - share) * unit) + vanilla_steps
        return self._branch_off(PlannedRun("switched", run, budget, "headless", steps, decay, vanilla_steps))

    def _branch_off(self, planned: PlannedRun) -> PlannedRun:
        """Branches off the trunk at the last checkpoint before the learning rate or objective of trunk or branch
        changes, unless the trunk's warm-up would be over half of the run."""
        unit, stable_units = self.units[planned.objective], self._longest - round(self._part.decay * self._longest)
        shared_steps = planned.steps - max(planned.decay_steps, planned.vanilla_steps)
        fork = min(shared_steps // unit, stable_units) * unit
        trunk = self._plan_run(planned.objective, self._longest).name
        return replace(planned, trunk=trunk, fork=fork) if fork and 2 * unit <= planned.steps else planned


PROBE_STEPS = 60
# Probes fix the settings that do not affect a step's cost, whatever a search found
PROBE_OVERRIDES = (
    *("schedule.name=cosine", "schedule.decay_steps=null", "schedule.warmup_steps=1"),
    *("optimizer.learning_rate=1e-3", "optimizer.table.learning_rate_ratio=1", "model.init_embedding_std=0.02"),
    *("optimizer.weight_decay=0.1", "optimizer.betas=[0.9,0.98]"),
)
TASK_EVERY = 5  # units between task evaluations
TASK_LIMIT = 100  # passages, and pairs of each paradigm, during training
# Tasks at the end of runs and their columns; encoders have BLiMP only
FULL_TASK_COLUMNS = {"blimp": "all of blimp", "lambada_openai": "lambada", "cloze": "all of cloze"}


@dataclass(frozen=True)
class Comparison:
    """The runs of one part and seed."""

    runner: ExperimentRunner
    name: str
    part: Part
    seed: int
    title: str  # prefix of the files of task results

    def points(self, kinds: Sequence[str]) -> list[Row]:
        """Trains the runs; returns a row for each evaluation of each."""
        data = self.runner.data(self.part.vocabulary, encoder=self.part.encoder)
        planner = RunPlanner(self.part, self.seed, self._vanilla_unit(data))
        selected = [planned for planned in planner.all() if planned.kind in kinds]
        for trunk in planner.trunks():
            if any(planned.trunk == trunk.name for planned in selected):
                self._train(planner, trunk, data)
        rows = [row for planned in selected for row in self._run_rows(planner, planned, data)]
        tasks = self.runner.tasks_data
        return rows if tasks is None else self._add_task_scores(rows, tasks, data)

    def folder_name(self, name: str) -> str:
        """The folder of a run."""
        return f"{self.name}-{self.seed}-{name}"

    def _objective_overrides(self, objective: str) -> list[str]:
        """Overrides for an objective with its own recipe; vanilla encoders have BERT's head."""
        kind = KINDS["encoder" if self.part.encoder else "decoder"]
        side = "tied" if self.part.encoder and objective == "vanilla" else objective
        return [*kind.objective_overrides(side, kind.found[side]), *self.part.long_run_settings.get(objective, ())]

    def _vanilla_unit(self, data: Sequence[str]) -> int:
        """Vanilla steps in a unit: the part's number, else measured; 1 if not needed."""
        if self.part.vanilla_unit is not None or list(self.part.kinds) == ["headless"]:
            return self.part.vanilla_unit or 1
        probes = {}
        for objective in ("vanilla", "headless"):
            overrides = [*data, *self.part.shape, *self._objective_overrides(objective)]
            probes[f"{self.name}-probe-{objective}"] = [*overrides, f"training.steps={PROBE_STEPS}", *PROBE_OVERRIDES]
        return max(1, round(self.part.unit / self.runner.relative_cost(self.part.config, probes)))

    def _run_rows(self, planner: RunPlanner, planned: PlannedRun, data: Sequence[str]) -> list[Row]:
        run = self._train(planner, planned, data)
        seconds = time_spent(run)
        if planned.trunk is not None:
            trunk = read_metrics(self.runner.folder / self.folder_name(planned.trunk))
            seconds += time_spent(trunk, last_step=planned.fork)
        tasks = {record["step"]: record["tasks"] for record in run.tasks}
        rows: list[Row] = []
        for record in run.validation:
            step, tokens = record["step"], record["tokens"]
            row: Row = {"run": planned.run, "seed": self.seed, "budget": planned.budget, "curve": planned.name}
            row |= {"time": planner.units_at_step(planned, step), "end": step == planned.steps}
            row |= {"hours": seconds * self.runner.ranks / 3600, "step": step, "tokens": tokens}  # hours of CPUs
            row |= evaluation_scores(record)
            rows.append(row | {task: scores["acc"]["value"] for task, scores in tasks.get(step, {}).items()})
        return rows

    def _train(self, planner: RunPlanner, planned: PlannedRun, data: Sequence[str]) -> RunMetrics:
        unit = planner.units[planned.objective]
        settings: Row = {"training.steps": planned.steps}
        settings |= dict.fromkeys(("training.evaluate_every", "training.checkpoint_every"), unit)
        settings |= {"training.keep_every": keep_every} if (keep_every := planner.keep_every(planned)) else {}
        settings |= {"schedule.name": "wsd", "schedule.warmup_steps": planner.warmup_steps(planned)}
        settings |= {"schedule.decay_steps": planned.decay_steps, "seed": self.seed}
        settings |= {"tasks": json.dumps(self._tasks(unit, data))}
        if planned.vanilla_steps:  # an untied head diverged at such rates
            share = planned.vanilla_steps / planned.steps
            settings |= {"objective.schedule.vanilla_share": share, "objective.tied": "true"}
        fork = None
        if planned.trunk is not None:
            settings["resume.allow"] = "[objective.schedule,objective.tied,schedule.decay_steps]"
            trunk = RunFolder(self.runner.folder / self.folder_name(planned.trunk))
            fork = trunk.checkpoints / f"step-{planned.fork:08d}"
        overrides = [*data, *self.part.shape, *self._objective_overrides(planned.objective), *to_overrides(settings)]
        return self.runner.train(self.part.config, self.folder_name(planned.name), *overrides, fork=fork)

    def _tasks(self, unit: int, data: Sequence[str]) -> Row | None:
        """Tasks during training: a cloze of the held-out text, for decoders, and BLiMP with --tasks-data."""
        tasks: Row = {"names": [], "every": TASK_EVERY * unit, "limit": TASK_LIMIT}
        if not self.part.encoder:
            tasks |= {"names": ["cloze"], "cloze": str(_cloze(data))}
        if self.runner.tasks_data is not None:
            tasks |= {"names": [*tasks["names"], "blimp"], "data": str(self.runner.tasks_data)}
        return tasks if tasks["names"] else None

    def _add_task_scores(self, rows: Sequence[Row], tasks: Path, data: Sequence[str]) -> list[Row]:
        """Adds scores on whole tasks, and their standard errors, to the final rows."""
        folders = [self.runner.folder / self.folder_name(row["curve"]) for row in rows if row["end"]]
        tasks_to_run, cloze = ("blimp", None) if self.part.encoder else (",".join(FULL_TASK_COLUMNS), _cloze(data))
        results_by_model = self.runner.score(f"{self.title}-tasks", tasks_to_run, None, tasks, folders, cloze=cloze)
        scores_by_folder: dict[str, Row] = {}
        for model, results in results_by_model.items():
            row = scores_by_folder.setdefault(model.name, {})
            for result in results:
                values, title = task_scores(result), FULL_TASK_COLUMNS[result.task]
                row |= {title: values["acc"], f"{title} ±": values["± acc"]}
                if "perplexity" in values:
                    row[f"{title} perplexity"] = values["perplexity"]
        return [row | (scores_by_folder[self.folder_name(row["curve"])] if row["end"] else {}) for row in rows]


def _cloze(data: Sequence[str]) -> Path:
    """The last-word test of the held-out text; built once."""
    settings = dict(override.split("=", 1) for override in data)
    output = Path(settings["data.validation"]).with_name("cloze.jsonl")
    with output_lock(output):
        if not output.exists():
            dataset, tokenizer = IndexedDataset(settings["data.validation"]), load_tokenizer(settings["data.tokenizer"])
            documents = output.with_name("held-out.jsonl")
            write_jsonl(documents, ({"text": tokenizer.decode(dataset[index])} for index in range(len(dataset))))
            build_cloze(documents, output)
    return output


PARTS = {name: Part(**{"shape": KINDS["encoder"].shape, **part}) for name, part in GRIDS["verdict"].items()}
VALUES = (
    *("accuracy", "perplexity", "bits per byte", "cloze", "blimp"),
    *(*FULL_TASK_COLUMNS.values(), "lambada perplexity", "hours"),
)
GLUE_ROWS = "10000"  # training rows at most: all of CoLA, MRPC, STS-B and RTE, a sixth of SST-2, a tenth of QNLI


def compare_verdict(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains the parts and kinds (headless, vanilla, switched) of `only`, or all."""
    kinds = {kind for part in PARTS.values() for kind in part.kinds}
    parts, chosen = select_names(only, PARTS, sorted(kinds))
    for name in parts:
        selected = [kind for kind in PARTS[name].kinds if kind in chosen]
        if selected:
            _compare(runner, name, PARTS[name], selected)


def _compare(runner: ExperimentRunner, name: str, part: Part, kinds: Sequence[str]) -> None:
    """Compares kinds of runs; files are named by the kinds, so that other kinds can run at the same time."""
    title = "-".join([f"verdict-{name}", *(kinds if len(kinds) < len(part.kinds) else [])])
    comparisons = [Comparison(runner, name, part, seed, title) for seed in part.budgets]
    points = [row for comparison in comparisons for row in comparison.points(kinds)]
    runner.record(title, points)
    ends = [row for row in points if row["end"]]
    values = [value for value in VALUES if all(value in row for row in ends)]
    runner.record(f"{title}-ends", aggregate_seeds(ends, ("budget", "run", "tokens"), values))
    if part.encoder and runner.tasks_data is not None:
        longest = (0, max(part.budgets[0]))  # of the first seed
        runs = [comparisons[0].folder_name(row["curve"]) for row in ends if (row["seed"], row["budget"]) == longest]
        results = [one for run in runs for one in fine_tune_on_glue(runner, run, runner.tasks_data, GLUE_ROWS)]
        runner.record(f"{title}-glue", task_table(results))
