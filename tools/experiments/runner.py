"""What every experiment needs: runs of the normal command, each done once, grids of them, and a record of results.

Several commands may share a folder: what two of them need, one makes while the other waits.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import yaml
from rich.console import Console

from experiments.measures import Chart, Row, cost, draw_charts, lines, measured, spent
from megahead.checkpoints.disk import find_checkpoint
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.data.tokenizer import load_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary
from megahead.distributed.group import Group
from megahead.distributed.launch import choose_device
from megahead.errors import FieldError, UserError
from megahead.evaluate.finetuning import FineTuningResult, FineTuningResults
from megahead.evaluate.results import ResultsFile, TaskResult
from megahead.quickstart import environment, launcher
from megahead.report.figures import save_figure
from megahead.report.read import RunMetrics, read_metrics
from megahead.report.tables import to_markdown, to_rich
from megahead.run_folder import RunFolder
from megahead.train.run import resolve_precision
from steps.once import StepRunner, output_lock

ROOT = Path(__file__).resolve().parents[2]
GRIDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("grids.yaml").read_text(encoding="utf-8"))


class Cell(NamedTuple):
    """A run of a grid: its value of each axis, and what came of it."""

    values: Row
    name: str
    run: RunMetrics

    def row(self, columns: Mapping[str, str]) -> Row:
        """The values, and the measures that `columns` name."""
        return self.values | measured(self.run, columns)


@dataclass(frozen=True)
class ExperimentRunner:
    """Trains named runs on `text` in `folder`; the overrides `settings` have the last word in all of them."""

    folder: Path
    text: Path | None
    settings: Sequence[str]
    console: Console
    vocabulary: int = 8_192
    tasks_data: Path | None = None  # as tools/eval_harness.py takes it; what needs task files is left out without
    tokenizer: Path | None = None  # another tokenizer.json, where an experiment changes to one
    held_out: int = 50  # one in so many documents is kept for evaluation
    ranks: int = 1  # of each run: two of a thread are faster than one of two threads where a step is short
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # the seed, tokens, seconds and settings of each

    def data(self, vocabulary: int | None = None, *, encoder: bool = False) -> list[str]:
        """The settings that name the text in so many ids: of byte-level BPE, for encoders of WordPiece, with the ids
        that masking needs. Made where it is missing."""
        size = vocabulary or self.vocabulary
        if not encoder:
            return [*self._indexed(f"bpe-{size}", size, [], []), f"model.vocab_size={size}"]
        words = f"wordpiece-{size}"
        settings = self._indexed(words, size, ["--type", "wordpiece", "--encoder"], ["--end-token", "[SEP]"])
        tokenizer = load_tokenizer(self.folder.parent / words / "tokenizer.json")
        ids: Row = {f"masking.{name}_token": tokenizer.id_of(f"[{name.upper()}]") for name in ("cls", "sep", "mask")}
        ids |= {"data.end_token": ids["masking.sep_token"], "model.vocab_size": tokenizer.vocab_size}
        return [*settings, *settings_of(ids), "masking.special_tokens=[]"]

    def data_in(self, tokenizer: Path) -> list[str]:
        """The settings that name the text in the ids of a tokenizer that is there."""
        spelled = ByteVocabulary.open(tokenizer)
        end = spelled.id_of_role("end")
        if end is None:
            raise FieldError("--tokenizer", "have a special token that ends a text", got=str(tokenizer))
        settings = self._cut(f"of-{tokenizer.stem}", tokenizer, ["--end-token", spelled.spellings[end] or ""])
        return [*settings, f"data.end_token={end}", f"model.vocab_size={len(spelled.spellings)}"]

    def given_text(self) -> Path:
        """What --text names. UserError when it is missing."""
        if self.text is None:
            raise FieldError("--text", "name what this experiment reads", got="missing")
        return self.text

    def _indexed(self, name: str, size: int, kind: Sequence[str], ends: Sequence[str]) -> list[str]:
        tokenizer = self.folder.parent / name / "tokenizer.json"
        self.make(tokenizer, "train_tokenizer.py", "--input", self.given_text(), *kind, "--vocab-size", size)
        return self._cut(name, tokenizer, ends)

    def _cut(self, name: str, tokenizer: Path, ends: Sequence[str]) -> list[str]:
        dataset = self.folder.parent / name / "text"
        how = ["--tokenizer", tokenizer, *ends, "--holdout", self.held_out]
        self.make(dataset.with_suffix(".idx"), "preprocess.py", "--input", self.given_text(), *how, output=dataset)
        return [f"data.train={dataset}", f"data.validation={dataset}-validation", f"data.tokenizer={tokenizer}"]

    def grid(self, name: str, only: Sequence[str] = (), *given: str, **fixed: Sequence[Any]) -> list[Cell]:
        """The runs of `GRIDS[name]`, trained: all, or those of which `only` has the name or a value of an axis.

        `given`: more settings, of the text where the grid says so; `fixed`: other values of some axes.
        """
        grid, cells = GRIDS[name], []
        for values, settings in points(grid, fixed):
            run = run_name(grid["run"].format(**values))
            if (only and not {run, *map(str, values.values())}.intersection(only)) or run in grid.get("without", ()):
                continue
            size = values.get("vocabulary", grid.get("vocabulary"))
            data = [] if grid.get("data") == "given" else self.data(size)
            config = grid.get("config", "").format(**values)
            trained = self.train(config, run, *data, *grid.get("settings", ()), *given, *settings)
            cells.append(Cell(values, run, trained))
        return cells

    def train(self, config: str, name: str, *overrides: str, fork: Path | None = None) -> RunMetrics:
        """`configs/CONFIG.yaml` trained to its end in `folder/NAME`, or read when it already was; a new run goes on
        from the checkpoint `fork`.

        Raises UserError with the end of its log when it fails, and when it was stopped before.
        """
        run, source = self.folder / name, f"configs/{config}.yaml"
        given = [*overrides, *self.settings, f"output_dir={run}", f"name={run.name}"]
        wanted = load_config(source, given)
        with output_lock(run):
            if not _finished(run, wanted):
                run.mkdir(parents=True, exist_ok=True)
                command = ["launch/pretrain.py", "--config", source]
                command += [part for override in given for part in ("--set", override)]
                if fork is not None and find_checkpoint(run) is None:
                    command += ["--resume", str(fork)]
                self._do(f"training {name}", command, run / "log.txt", self.ranks)
            if not _finished(run, wanted):  # a run that is asked to stop saves, and ends without an error
                raise UserError(f"training {name} must reach its last step, but was stopped; call again to go on.")
        metrics = read_metrics(run)
        last = metrics.training[-1]
        self.runs[name] = {"seed": wanted.seed, "tokens": last["tokens"], "seconds": last["seconds"]}
        self.runs[name]["config"] = wanted.model_dump(mode="json")
        self.console.print(f"{name}: perplexity {metrics.validation[-1]['perplexity']:,.1f}", soft_wrap=True)
        return metrics

    def run(self, tool: str, *arguments: object) -> None:
        """Runs tools/TOOL, whose output goes to `folder`/TOOL.log. UserError when it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._do(f"running {tool}", [f"tools/{tool}", *map(str, arguments)], self.folder / f"{tool}.log")

    def make(self, made: Path, tool: str, *arguments: object, output: Path | None = None) -> None:
        """Runs tools/TOOL with `--output` (`made`, or what it is called by) once, and again if its arguments changed.
        What lies there from an earlier version, which kept no records, is taken as it is: runs were trained on it.
        UserError when it fails."""
        once = StepRunner(made.parent / "made", self.console)
        earlier = made.exists() and not once.has_started(made.stem)
        words = [os.path.relpath(word, made.parent) if isinstance(word, Path) else str(word) for word in arguments]

        def work() -> str:
            if earlier:
                return f"{made.name}, of an earlier version"
            if made.is_dir():  # of other arguments, or of a call that was killed before its record was written
                shutil.rmtree(made)
            command = [f"tools/{tool}", *map(str, arguments), "--output", str(output or made)]
            self._do(f"making {made.name}", command, made.with_name(f"{made.name}.log"))
            return made.name

        once.run(made.stem, work, settings={"command": [tool, *words]}, outputs=[made])

    def _do(self, what: str, command: Sequence[str], log: Path, ranks: int = 1) -> None:
        with self.console.status(what), log.open("a") as output:
            code = run_python(command, output, ranks)
        if code:
            last = "\n".join(log.read_text().splitlines()[-15:])
            raise UserError(f"{what} must come to its end, but failed; its last lines:\n{last}")

    def score(
        self, name: str, tasks: str, limit: int | None, data: Path, models: Sequence[Path], cloze: Path | None = None
    ) -> dict[Path, list[TaskResult]]:
        """What each model reaches on the harness's tasks: on the first `limit` examples, or on all; `folder`/NAME.json
        keeps it. `cloze`: the passages of that task."""
        output = self.folder / f"{name}.json"
        given = {"tasks": tasks, "data": data, "output": output, "limit": limit, "cloze": cloze}
        what = [word for option, value in given.items() if value is not None for word in (f"--{option}", value)]
        self.run("eval_harness.py", *what, "--model", *models)
        kept = ResultsFile(output)
        return {model: list(kept.for_model(model, limit)) for model in models}

    def fine_tune(self, output: str, models: Sequence[str], *what: str) -> list[FineTuningResult]:
        """Results of those runs, and of what else `output` has; `folder`/OUTPUT.json keeps them."""
        path = self.folder / f"{output}.json"
        self.run("finetune.py", "--model", *(self.folder / name for name in models), *what, "--output", path)
        return FineTuningResults(path).newest()

    def record(self, name: str, rows: Sequence[Row], *charts: Chart) -> None:
        """Prints the rows; `folder` gets NAME.json with how they were made, NAME.md as a table, NAME.png as charts."""
        described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        made = {
            "command": [Path(sys.executable).name, *sys.argv],
            "commit": described.stdout.strip() or "unknown",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
            "settings": list(self.settings),
            "runs": self.runs,
            "results": list(rows),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        (self.folder / f"{name}.md").write_text(to_markdown(rows), encoding="utf-8")
        if charts:
            save_figure(draw_charts(charts), self.folder / f"{name}.png")
        self.console.print(to_rich(rows))

    def relative_cost(self, config: str, pair: Mapping[str, Sequence[str]]) -> float:
        """Of a token of the first run, where one of the second costs 1. Both, by name with their settings, train for a
        few steps at the same time, so that what else keeps the machine busy slows both. A pair of which one was stopped
        begins anew: else the other would have gone on alone."""
        quiet = replace(self, console=Console(quiet=True))
        with output_lock(self.folder / "-and-".join(pair)), ThreadPoolExecutor() as pool:
            if not all(ended(self.folder / name) for name in pair):
                for name in pair:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            ours, theirs = pool.map(lambda name: quiet.train(config, name, *pair[name]), pair)
        both = min(run.training[-1]["seconds"] for run in (ours, theirs))
        return _cost(ours, both) / _cost(theirs, both)


def points(grid: Mapping[str, Any], fixed: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Row, list[str]]]:
    """A grid's points: a value of each axis, and the settings that these stand for."""
    sides: list[list[tuple[Any, list[str]]]] = []
    for name, axis in grid["axes"].items():
        if "values" in axis:
            key = axis.get("set")
            sides.append([(value, [f"{key}={value}"] if key else []) for value in fixed.get(name, axis["values"])])
        else:
            sides.append([(value, axis[value]) for value in fixed.get(name, axis)])
    for point in product(*sides):
        values = dict(zip(grid["axes"], (value for value, _ in point), strict=True))
        yield values, [setting for _, settings in point for setting in settings]


def run_name(words: str) -> str:
    """As a run's name must be: `32,768 ids` becomes `32768-ids`."""
    return re.sub("[,%]", "", words.replace(", ", "-").replace(" ", "-").replace("/", "_"))


def settings_of(values: Mapping[str, Any]) -> list[str]:
    """As overrides of a config."""
    return [f"{key}={value}" for key, value in values.items()]


def charts_of(name: str, rows: Sequence[Row]) -> list[Chart]:
    """Those of `GRIDS[name]`."""
    told = []
    for spec in GRIDS[name]["charts"]:
        options = {key: value for key, value in spec.items() if key not in ("line", "up")}
        told.append(Chart(lines=lines(rows, spec["line"], spec["across"], spec["up"]), **options))
    return told


def course(steps: int, **more: Any) -> list[str]:
    """Overrides of a run of so many steps, evaluated and saved at its end where `more` settings of training don't say
    otherwise."""
    training = {"steps": steps, "checkpoint_every": steps, "evaluate_every": steps} | more
    return [f"training.{name}={value}" for name, value in training.items()]


def scores_of(result: TaskResult) -> Row:
    """Metric to value, and `± METRIC` to its standard error."""
    values = {score.metric: score.value for score in result.scores}
    return values | {f"± {score.metric}": score.stderr for score in result.scores}


def run_python(command: Sequence[str], output: TextIO, ranks: int = 1) -> int:
    """Exit code of `python COMMAND ...`, run where the project is."""
    words = [sys.executable, *launcher(ranks), *command]
    return subprocess.run(words, cwd=ROOT, env=environment(ranks), stdout=output, stderr=output).returncode


def _finished(run: Path, config: RunConfig) -> bool:
    """Whether the folder holds a run of just these settings that came to its end, evaluations included.

    What settings did not exist yet when it ran has its default.
    """
    folder = RunFolder(run)
    if not ended(run) or not folder.config.exists():
        return False
    device = choose_device(config.engine.device, local_rank=0)
    return load_config(folder.config) == resolve_precision(config, device, Group())  # it says what auto came to


def ended(run: Path) -> bool:
    """Whether the last session in a run folder trained to its last step and said so."""
    try:
        return bool(json.loads(RunFolder(run).ending.read_text())["ending"] == "finished")
    except OSError:
        return False


def _cost(run: RunMetrics, seconds: float) -> float:
    """Of a token in so many seconds of training, when both ran, without the first log line, where all begins."""
    first, *others = [record for record in run.training if record["seconds"] <= seconds] or [run.training[0]]
    if not others:
        return cost(run)
    last = others[-1]
    return (spent(run, last["step"]) - spent(run, first["step"])) / float(last["tokens"] - first["tokens"])
