"""Runs of the training command, each trained once, grids of runs, and records of results, for all experiments.

Several commands may share a folder; locks keep two of them from making the same output.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import yaml
from rich.console import Console

from experiments.measures import MEASURES, Chart, Row, draw_charts, time_spent
from megahead.checkpoints.disk import find_checkpoint
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.data.tokenizer import load_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary
from megahead.distributed.group import Group
from megahead.distributed.launch import choose_device
from megahead.errors import FieldError, UserError
from megahead.evaluate.finetuning_comparison import FineTuningResult, FineTuningResults
from megahead.evaluate.results import ResultsFile, TaskResult
from megahead.files import read_json, write_atomically
from megahead.report.figures import save_figure
from megahead.report.read import RunMetrics, read_metrics
from megahead.report.tables import to_markdown, to_rich
from megahead.run_folder import RunFolder
from megahead.run_process import environment, launcher
from megahead.train.run import resolve_precision
from steps.once import StepRunner, output_lock

ROOT = Path(__file__).resolve().parents[2]
PROBE_STEPS = 12
Name = TypeVar("Name")
GRIDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("grids.yaml").read_text(encoding="utf-8"))


class Cell(NamedTuple):
    """A run of a grid, with its value of each axis."""

    values: Row
    name: str
    run: RunMetrics

    def row(self, columns: Mapping[str, str]) -> Row:
        """A table row: values of the axes, and by title of `columns` one of MEASURES or a last score."""
        run, last = self.run, self.run.validation[-1]
        measured = {title: MEASURES[name](run) if name in MEASURES else last[name] for title, name in columns.items()}
        return self.values | measured


@dataclass(frozen=True)
class ExperimentRunner:
    """Trains named runs on `text` in `folder`; the overrides `settings` take precedence in all of them."""

    folder: Path
    text: Path | None
    settings: Sequence[str]
    console: Console
    vocabulary: int = 8_192
    tasks_data: Path | None = None  # as for tools/eval_harness.py; None: evaluations that need it are left out
    tokenizer: Path | None = None  # another tokenizer.json, for experiments that change to one or take any
    columns: Sequence[str] = ("user_id", "item_id", "timestamp")  # of a table of events
    rivals_python: Path | None = None  # an interpreter that has the libraries of related methods
    minutes: float | None = None  # of CPU for each run, in experiments of equal time
    held_out: int = 50  # one in so many documents is kept for evaluation
    ranks: int = 1  # of each run; for short steps two of one thread are faster than one of two threads
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # the seed, tokens, seconds and settings of each

    def data(self, vocabulary: int | None = None, *, encoder: bool = False) -> list[str]:
        """Overrides for the text in a vocabulary of this size (byte-level BPE; for encoders WordPiece with special
        tokens). Builds the tokenizer and the dataset if they are missing."""
        size = vocabulary or self.vocabulary
        name, kind = (f"wordpiece-{size}", ("--type", "wordpiece", "--encoder")) if encoder else (f"bpe-{size}", ())
        tokenizer = self.folder.parent / name / "tokenizer.json"
        self.make(tokenizer, "train_tokenizer.py", "--input", self.require_text(), *kind, "--vocab-size", size)
        if encoder:
            return self._tokenize_for_encoder(name, tokenizer)
        return [*self._tokenize(name, tokenizer), f"model.vocab_size={size}"]

    def data_with_tokenizer(self, tokenizer: Path, *, encoder: bool = False) -> list[str]:
        """Overrides for the text in the ids of an existing tokenizer."""
        name = f"of-{tokenizer.stem}"
        if encoder:
            return self._tokenize_for_encoder(name, tokenizer)
        vocabulary = ByteVocabulary.open(tokenizer)
        end_id = vocabulary.id_of_role("end")
        if end_id is None:
            raise FieldError("--tokenizer", "have a special token that ends a text", got=str(tokenizer))
        settings = self._tokenize(name, tokenizer, "--end-token", vocabulary.spellings[end_id] or "")
        return [*settings, f"data.end_token={end_id}", f"model.vocab_size={len(vocabulary.spellings)}"]

    def require_text(self) -> Path:
        """The path of --text. FieldError if it is missing."""
        if self.text is None:
            raise FieldError("--text", "name what this experiment reads", got="missing")
        return self.text

    def _tokenize_for_encoder(self, name: str, tokenizer_file: Path) -> list[str]:
        """Overrides of the text, the special tokens and the number of ids."""
        settings = self._tokenize(name, tokenizer_file, "--end-token", "[SEP]")
        tokenizer = load_tokenizer(tokenizer_file)
        ids: Row = {f"masking.{name}_token": tokenizer.id_of(f"[{name.upper()}]") for name in ("cls", "sep", "mask")}
        ids |= {"data.end_token": ids["masking.sep_token"], "model.vocab_size": tokenizer.vocab_size}
        return [*settings, *to_overrides(ids), "masking.special_tokens=[]"]

    def _tokenize(self, name: str, tokenizer: Path, *end_options: str) -> list[str]:
        dataset = self.folder.parent / name / "text"
        how = ["--tokenizer", tokenizer, *end_options, "--holdout", self.held_out]
        self.make(dataset.with_suffix(".idx"), "preprocess.py", "--input", self.require_text(), *how, output=dataset)
        return [f"data.train={dataset}", f"data.validation={dataset}-validation", f"data.tokenizer={tokenizer}"]

    def grid(self, name: str, only: Sequence[str] = (), *overrides: str, **axis_values: Sequence[Any]) -> list[Cell]:
        """Trains the runs of `GRIDS[name]`: all, or those whose name or value of an axis is in `only`. FieldError for
        another name.

        `overrides`: for all runs; with the datasets if the grid has `data: external`. `axis_values`: replace its own.
        """
        grid, cells = GRIDS[name], []
        points = [(run_name(grid["run"].format(**one)), one, sets) for one, sets in grid_points(grid, axis_values)]
        if not axis_values:
            select_names(only, [name for run, values, _ in points for name in (*values.values(), run)])
        for run, values, settings in points:
            if (only and not {run, *map(str, values.values())}.intersection(only)) or run in grid.get("exclude", ()):
                continue
            size = values.get("vocabulary", grid.get("vocabulary"))
            is_external, is_encoder = grid.get("data") == "external", grid.get("is_encoder", False)
            data = [] if is_external else self.data(size, encoder=is_encoder)
            config = grid.get("config", "").format(**values)
            metrics = self.train(config, run, *data, *grid.get("settings", ()), *overrides, *settings)
            cells.append(Cell(values, run, metrics))
        return cells

    def train(self, config_name: str, name: str, *overrides: str, fork: Path | None = None) -> RunMetrics:
        """Trains `configs/CONFIG.yaml` to its end in `folder/NAME`, unless it has been; a new run starts from the
        checkpoint `fork`.

        UserError if it fails, with the end of its log, or is stopped.
        """
        run, source = self.folder / name, f"configs/{config_name}.yaml"
        all_overrides = [*overrides, *self.settings, f"output_dir={run}", f"name={run.name}"]
        config = load_config(source, all_overrides)
        with output_lock(run):
            if not _is_finished(run, config):
                run.mkdir(parents=True, exist_ok=True)
                command = ["launch/pretrain.py", "--config", source]
                command += [part for override in all_overrides for part in ("--set", override)]
                if fork is not None and find_checkpoint(run) is None:
                    command += ["--resume", str(fork)]
                self._run_command(f"training {name}", command, run / "log.txt", self.ranks)
            if not _is_finished(run, config):  # a run that receives a signal saves, and exits without an error
                raise UserError(f"training {name} must reach its last step, but was stopped; call again to go on.")
        metrics = read_metrics(run)
        last = metrics.training[-1]
        self.runs[name] = {"seed": config.seed, "tokens": last["tokens"], "seconds": last["seconds"]}
        self.runs[name]["config"] = config.model_dump(mode="json")
        self.console.print(f"{name}: perplexity {metrics.validation[-1]['perplexity']:,.1f}", soft_wrap=True)
        return metrics

    def step_seconds(self, config_name: str, name: str, *overrides: str) -> float:
        """CPU seconds (on a GPU wall seconds) of a step of a short run `NAME-probe`, without its slow first two."""
        short = training_overrides(PROBE_STEPS, evaluate_samples=8, log_seconds=0)
        run = self.train(config_name, f"{name}-probe", *overrides, *short)
        seconds = (time_spent(run) - time_spent(run, 2)) / (int(run.training[-1]["step"]) - 2)
        if seconds <= 0:
            raise UserError(f"steps of {name} must take time, but take {seconds:.3f} s; raise PROBE_STEPS.")
        return seconds

    def steps_within(self, minutes: float, config_name: str, name: str, *overrides: str) -> int:
        """How many steps take `minutes` at the speed of a short run; at least two."""
        return max(2, round(60 * minutes / self.step_seconds(config_name, name, *overrides)))

    def run(self, tool: str, *arguments: object) -> None:
        """Runs tools/TOOL, whose output goes to `folder`/TOOL.log. UserError when it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run_command(f"running {tool}", [f"tools/{tool}", *map(str, arguments)], self.folder / f"{tool}.log")

    def make(self, output_path: Path, tool: str, *arguments: object, output: Path | None = None) -> None:
        """Runs tools/TOOL with `--output` (`output`, else `output_path`) once, and again if its arguments changed.
        UserError if it fails."""
        folder, name = output_path.parent, output_path.name

        def work() -> str:
            if output_path.is_dir():  # from other arguments or a killed call
                shutil.rmtree(output_path)
            command = [f"tools/{tool}", *map(str, arguments), "--output", str(output or output_path)]
            self._run_command(f"making {name}", command, folder / f"{name}.log")
            return name

        words = [os.path.relpath(word, folder) if isinstance(word, Path) else str(word) for word in arguments]
        step_runner, settings = StepRunner(folder / "made", self.console), {"command": [tool, *words]}
        step_runner.run(output_path.stem, work, settings=settings, outputs=[output_path])

    def _run_command(self, what: str, command: Sequence[str], log: Path, ranks: int = 1) -> None:
        with self.console.status(what), log.open("a") as output:
            code = run_python(command, output, ranks)
        if code:
            last = "\n".join(log.read_text().splitlines()[-15:])
            raise UserError(f"{what} must come to its end, but failed; its last lines:\n{last}")

    def score(
        self, name: str, tasks: str, limit: int | None, data: Path | None, models: Sequence[Path], **files: Path | None
    ) -> dict[Path, list[TaskResult]]:
        """Scores models on the harness's tasks, on the first `limit` examples or on all; saves to `folder`/NAME.json.

        `files`: those of tasks whose file is an option of tools/eval_harness.py (`cloze`, `articles`), by its name."""
        output = self.folder / f"{name}.json"
        options = {"tasks": tasks, "data": data, "output": output, "limit": limit, **files}
        given = {f"--{option}": value for option, value in options.items() if value is not None}
        self.run("eval_harness.py", *chain.from_iterable(given.items()), "--model", *models)
        saved = ResultsFile(output)
        return {model: list(saved.for_model(model, limit)) for model in models}

    def fine_tune(self, output: str, models: Sequence[str], *options: str) -> list[FineTuningResult]:
        """Fine-tunes the runs `models`; returns all results saved in `folder`/OUTPUT.json."""
        path = self.folder / f"{output}.json"
        self.run("finetune.py", "--model", *(self.folder / name for name in models), *options, "--output", path)
        return FineTuningResults(path).newest()

    def record(self, name: str, rows: Sequence[Row], *charts: Chart) -> None:
        """Prints the rows; writes NAME.json with their provenance, NAME.md with a table, and NAME.png with charts."""
        command = ["git", "describe", "--always", "--dirty"]
        git_version = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        record = {
            "command": [Path(sys.executable).name, *sys.argv],
            "commit": git_version.stdout.strip() or "unknown",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
            "settings": list(self.settings),
            "runs": self.runs,
            "results": list(rows),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
        write_atomically(self.folder / f"{name}.md", to_markdown(rows))
        if charts:
            save_figure(draw_charts(charts), self.folder / f"{name}.png")
        self.console.print(to_rich(rows))

    def relative_cost(self, config: str, pair: Mapping[str, Sequence[str]]) -> float:
        """Cost of a token of the first run relative to the second. `pair`: overrides by name.

        Both train a few steps at the same time, so that other load slows both. If one was stopped, both restart."""
        quiet = replace(self, console=Console(quiet=True))
        with output_lock(self.folder / "-and-".join(pair)), ThreadPoolExecutor() as pool:
            if not all(has_ended(self.folder / name) for name in pair):
                for name in pair:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            first, second = pool.map(lambda name: quiet.train(config, name, *pair[name]), pair)
        overlap_seconds = min(run.training[-1]["seconds"] for run in (first, second))
        return _cost(first, overlap_seconds) / _cost(second, overlap_seconds)


def select_names(only: Sequence[str], *groups: Iterable[Name]) -> tuple[list[Name], ...]:
    """The names of each group that are in `only` (--only), or all if none is. FieldError for other names."""
    listed = [list(dict.fromkeys(group)) for group in groups]
    known = [str(name) for group in listed for name in group]
    if unknown := [name for name in only if name not in known]:
        raise FieldError("--only", f"name some of {', '.join(known)}", got=unknown[0])
    return tuple([name for name in group if str(name) in only] or group for group in listed)


def grid_points(grid: Mapping[str, Any], axis_values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Row, list[str]]]:
    """Yields a grid's points: a value of each axis, and their overrides."""
    axes = grid["axes"]
    for point in product(*(axis_values.get(name, axis.get("values", axis)) for name, axis in axes.items())):
        values = dict(zip(axes, point, strict=True))
        yield values, [override for name, value in values.items() for override in _axis_overrides(axes[name], value)]


def _axis_overrides(axis: Mapping[str, Any], value: Any) -> list[str]:
    if "values" not in axis:
        return list(axis[value])
    return [f"{axis['set']}={value}"] if "set" in axis else []


def run_name(name: str) -> str:
    """Turns text into a valid run name: `32,768 ids` into `32768-ids`."""
    return re.sub("[,%]", "", name.replace(", ", "-").replace(" ", "-").replace("/", "_"))


def to_overrides(values: Mapping[str, Any]) -> list[str]:
    """Turns settings into overrides `a.b=c`."""
    return [f"{key}={value}" for key, value in values.items()]


def grid_charts(name: str, rows: Sequence[Row]) -> list[Chart]:
    """The charts of `GRIDS[name]`."""
    return [Chart.of(rows, **spec) for spec in GRIDS[name]["charts"]]


def training_overrides(steps: int, **settings: Any) -> list[str]:
    """Overrides of a run of so many steps, evaluated and saved at its end unless `settings` of training differ."""
    training = {"steps": steps, "checkpoint_every": steps, "evaluate_every": steps} | settings
    return [f"training.{name}={value}" for name, value in training.items()]


def task_scores(result: TaskResult) -> Row:
    """Values by METRIC, and standard errors by `± METRIC`."""
    values = {score.metric: score.value for score in result.scores}
    return values | {f"± {score.metric}": score.stderr for score in result.scores}


def run_python(command: Sequence[str], output: TextIO, ranks: int = 1) -> int:
    """Runs `python COMMAND ...` in the project's root; returns the exit code."""
    command_line = [sys.executable, *launcher(ranks), *command]
    return subprocess.run(command_line, cwd=ROOT, env=environment(ranks), stdout=output, stderr=output).returncode


def _is_finished(run: Path, config: RunConfig) -> bool:
    """Whether the folder has a finished run of these settings, evaluations included.

    Settings that are newer than the run count as defaults.
    """
    folder = RunFolder(run)
    if not has_ended(run) or not folder.config.exists():
        return False
    device = choose_device(config.engine.device, local_rank=0)
    resolved = resolve_precision(config, device, Group())  # as in the saved config
    return load_config(folder.config) == resolved


def has_ended(run: Path) -> bool:
    """Whether the last session in a run folder finished."""
    end = read_json(RunFolder(run).session_end)
    return end is not None and end["ending"] == "finished"


def _cost(run: RunMetrics, seconds: float) -> float:
    """Cost of a token in the first `seconds` of training, without those before the first log line."""
    first, *others = [record for record in run.training if record["seconds"] <= seconds] or [run.training[0]]
    if not others:
        return time_spent(run) / float(run.training[-1]["tokens"])
    last = others[-1]
    return (time_spent(run, last["step"]) - time_spent(run, first["step"])) / float(last["tokens"] - first["tokens"])
