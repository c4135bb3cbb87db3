"""Reads run folders: metrics, settings, samples, events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megahead.errors import DataError, UserError
from megahead.evaluate.results import ResultCache
from megahead.files import read_if_exists, read_json
from megahead.run_folder import RunFolder
from megahead.wording import format_numbers, format_range, pluralize

Record = Mapping[str, Any]

_RESTART_KEYS = {"session", "rollback"}
"""Keys of records after which a run continues from an earlier step."""

_TAIL_BYTES = 1 << 16
_EVENT_KEYS = {*_RESTART_KEYS, "fault", "slow", "replica", "copy", "mirror"}


@dataclass(frozen=True)
class RunMetrics:
    """One run's log: training lines and evaluations, each in the order of their steps."""

    name: str
    training: Sequence[Record]
    """{"step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second", ...}"""

    validation: Sequence[Record]
    """{"step", "tokens", "seconds", "perplexity", "bits_per_byte", "accuracy", "loss", "head", "upper_bound"};
    upper_bound (missing in older logs): whether the values are upper bounds, as in masked diffusion"""

    tasks: Sequence[Record] = ()
    """{"step", "tokens", "seconds", "tasks": {task: {metric: {"value", "stderr"}}}}, evaluations of lm-eval tasks"""

    events: Sequence[Record] = ()
    """{"step", "tokens", "seconds"} with one of "session" (a start), "fault" (a bad step), "rollback", "slow" (a
    straggling rank), "replica" (weights differed between data ranks), "copy" (a checkpoint in memory) and "mirror" (an
    upload to the remote store). In the order of the log, including events of steps that were rolled back."""


def read_metrics(run: Path) -> RunMetrics:
    """The metrics of a run folder (or of a metrics.jsonl itself).

    Ignores an incomplete last line and steps that a rollback or a later session discarded, unless one after it
    continues them; of several lines for one step the last counts. UserError if there is no log, or if another line is
    malformed.
    """
    path = run if run.suffix == ".jsonl" else RunFolder(run).metrics
    history, earlier, saved_in, events = _History(), list[_History](), dict[int, _History](), list[Record]()
    for record in _records(path):
        if _EVENT_KEYS & record.keys():
            events.append(record)
        else:
            history.lines.append(record)
        if "checkpoint" in record:
            saved_in[record["step"]] = history
        if _RESTART_KEYS & record.keys():
            session = record.get("session", {})
            last_valid = session.get("continues", record["step"])
            earlier.append(history)
            if "session" in record and "newer_by" not in session.get("memory", {}):  # which is of the latest history
                reaching = (h for h in reversed(earlier) if h.last_step() >= last_valid)
                history = saved_in.get(last_valid) or next(reaching, history)
            history = _History(history, last_valid)
    by_step: dict[str, dict[int, Record]] = {"training": {}, "validation": {}, "tasks": {}}
    for line in history.all_lines():
        if "validation" in line:
            progress = {key: line[key] for key in ("step", "tokens", "seconds")}
            by_step["validation"][line["step"]] = progress | line["validation"]
        elif "tasks" in line:
            by_step["tasks"][line["step"]] = line
        elif "loss" in line:
            by_step["training"][line["step"]] = line
    if not by_step["training"] and not by_step["validation"]:
        raise UserError(f"{path} must hold metrics of a run, but holds no line yet; try again after the first step.")
    name = path.parent.name if path.parent.name not in ("", "..") else path.parent.resolve().name
    ordered = {kind: [lines[step] for step in sorted(lines)] for kind, lines in by_step.items()}
    return RunMetrics(name, **ordered, events=events)


@dataclass(frozen=True)
class _History:
    """The lines of a log from one restart to the next, and the history that they continue."""

    origin: _History | None = None
    continues: int = 0
    """The last step of `origin` that is valid here."""

    lines: list[Record] = field(default_factory=list)

    def last_step(self) -> int:
        return max(self.continues, self.lines[-1]["step"] if self.lines else 0)

    def all_lines(self) -> list[Record]:
        """With those of its origins, oldest first."""
        lines, history, last_valid = [self.lines], self, math.inf
        while history.origin is not None:
            history, last_valid = history.origin, min(last_valid, history.continues)
            lines.append([line for line in history.lines if line["step"] <= last_valid])
        return [line for part in reversed(lines) for line in part]


def last_logged_step(run: Path) -> int:
    """The step of the last training line in a run folder's log; 0 if it has none. Reads only the log's end, so that it
    costs a running training nothing."""
    with suppress(OSError), RunFolder(run).metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")[:-1]):
            with suppress(ValueError):  # the first line may be cut
                record = json.loads(line)
                if "loss" in record:
                    return int(record["step"])
    return 0


def read_all_metrics(runs: Sequence[Path]) -> list[RunMetrics]:
    """The metrics of several runs. Runs with the same name are named by their paths."""
    all_metrics = [read_metrics(run) for run in runs]
    names = [metrics.name for metrics in all_metrics]
    return [
        replace(metrics, name=str(run)) if names.count(metrics.name) > 1 else metrics
        for run, metrics in zip(runs, all_metrics, strict=True)
    ]


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(
            f"{path} must be the metrics of a run, but cannot be read ({error.strerror}); "
            "name a run folder such as runs/NAME."
        ) from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            record["step"], record["tokens"], record["seconds"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # a complete line ends in a newline
                break
            raise UserError(
                f"{path} must hold a JSON object with step, tokens and seconds a line, but line {number} is not."
            ) from None
        records.append(record)
    return records


# A run's folder: metrics, configuration, generated samples, and how the run ended.

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run's folder; missing files are empty."""

    folder: RunFolder
    metrics: RunMetrics

    config: Config
    """The content of RUN/config.yaml, not validated, so that runs of earlier versions can be read."""

    geometry: Sequence[Record]
    """Measures of outputs and embeddings such as rank and anisotropy (the fields of `evaluate.geometry.Geometry`), and
    {"step", "tokens", "seconds"}, of each checkpoint measured"""

    samples: Sequence[Record]
    """{"prompt", "text", ...} for each line of RUN/samples.jsonl, which `megahead generate --output` writes"""

    ending: str | None
    """finished, out of time or stopped; None while a session runs, or after one that was killed"""

    @property
    def name(self) -> str:
        return self.metrics.name

    def number(self, path: str) -> float | None:
        """The number at `section.field`, or None."""
        return value if isinstance(value := self._setting(path), (int, float)) else None

    def text(self, path: str) -> str | None:
        """The string at `section.field`, or None."""
        return value if isinstance(value := self._setting(path), str) else None

    def _setting(self, path: str) -> Any:
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, named as by `read_all_metrics`. UserError if a log cannot be read."""
    return [
        Run(
            folder,
            metrics,
            _read_config(folder.config),
            _read_geometry(folder.geometry),
            _read_samples(folder.samples),
            _read_ending(folder.session_end),
        )
        for folder, metrics in zip(map(RunFolder, folders), read_all_metrics(folders), strict=True)
    ]


def _read_config(path: Path) -> Config:
    tree = None
    with suppress(ValueError, yaml.YAMLError):
        tree = yaml.safe_load(read_if_exists(path) or b"")
    return tree if isinstance(tree, dict) else {}


def _read_geometry(path: Path) -> list[Record]:
    try:
        return sorted(ResultCache(path, "step").entries, key=lambda entry: int(entry["step"]))
    except (DataError, ValueError):
        return []


def _read_samples(path: Path) -> list[Record]:
    samples = []
    for line in (read_if_exists(path) or b"").split(b"\n"):  # not splitlines: a text may contain other line separators
        with suppress(ValueError):  # incomplete
            samples.append(json.loads(line))
    return [sample for sample in samples if isinstance(sample, dict) and {"prompt", "text"} <= sample.keys()]


def _read_ending(path: Path) -> str | None:
    with suppress(KeyError, TypeError):
        return str(read_json(path)["ending"])
    return None


# Events of a run: sessions that resumed, damaged checkpoints, bad steps and rollbacks.

_ACTION_TEXTS = {"note": "noted", "apply": "applied all the same", "skip": "skipped"}
_ACTION_TEXTS |= {"rollback": "rolled back", "stop": "ended the run"}


@dataclass(frozen=True)
class Event:
    """An event of a run, described in a sentence."""

    step: int
    tokens: int
    seconds: float
    text: str

    wrong: bool
    """Whether it is a problem."""


def events_of(run: Run) -> list[Event]:
    """The events of a run in the order of its log, without its first start."""
    return [
        Event(record["step"], record["tokens"], record["seconds"], text, wrong)
        for record in run.metrics.events
        for text, wrong in _messages(record)
    ]


def _messages(record: Record) -> Iterator[tuple[str, bool]]:
    """(sentence, whether it is a problem) for each event of a record."""
    match record:
        case {"session": session}:
            yield from _session_messages(session)
        case {"fault": fault}:
            yield _fault_message(fault), fault["kind"] != "overflow"
        case {"rollback": rollback}:
            yield f"rolled back to {rollback['checkpoint']}", False
        case {"slow": slow}:
            times = slow["seconds"] / slow["usual"]
            yield f"rank {slow['rank']} on {slow['host']} took {times:.1f} times as long as the others", True
        case {"replica": replica}:
            ranks, action = format_numbers("rank", replica["ranks"]), _ACTION_TEXTS[replica["action"]]
            yield f"weights of {ranks} differed from the other replicas': {action}", True
        case {"copy": {"off": reason}}:
            yield f"kept no more copies in memory: {reason}", True
        case {"copy": {"skipped": 1}}:
            yield "a copy in memory was skipped: the last one had not finished", True
        case {"mirror": {"failed": reason, **upload}}:
            content = f"step {upload['step']:,}" if "step" in upload else "the log"
            yield f"{content} did not get to the remote store: {reason}", True
        case {"mirror": {"skipped": _, "step": step}}:
            yield f"step {step:,} was not uploaded: an older checkpoint had not finished", True


def _session_messages(session: Record) -> Iterator[tuple[str, bool]]:
    for message in session.get("damaged", ()):
        yield f"skipped a damaged checkpoint: {message}", True
    if session.get("resumed") is not None:
        new_phase = session.get("new_phase", False)
        yield f"{'the next phase continued' if new_phase else 'resumed'} from {session['resumed']}", False
    mirror = session.get("mirror", {})
    if "fetched" in mirror:
        yield "the checkpoint came from the remote store", False
    for message in mirror.get("problems", ()):
        yield f"skipped a damaged checkpoint of the remote store: {message}", True
    memory = session.get("memory", {})
    if "newer_by" in memory:
        yield f"the checkpoint came from memory, {pluralize(memory['newer_by'], 'step')} more than on disk", False
    for message in memory.get("problems", ()):
        yield f"skipped a copy in memory: {message}", True
    if "mesh_before" in session:
        current, previous = (_describe_mesh(session[key]) for key in ("mesh", "mesh_before"))
        yield f"continued on {current} instead of {previous}", False


def _describe_mesh(mesh: Mapping[str, int]) -> str:
    tensor = f" x {mesh['tensor']} tensor ranks" if mesh["tensor"] > 1 else ""
    spare = f" ({mesh['waiting']} spare)" if mesh["waiting"] else ""
    return f"{pluralize(mesh['data'], 'data rank')}{tensor}{spare}"


def _fault_message(fault: Record) -> str:
    micro_batches = fault.get("where", ())
    ranks = sorted({batch["rank"] for batch in micro_batches if batch["rank"] is not None})
    samples = ", ".join(format_range("sample", range(batch["first"], batch["last"] + 1)) for batch in micro_batches[:3])
    on_ranks = f" on {format_numbers('rank', ranks)}" if ranks else ""
    problem = f"{fault['kind']} (loss {fault['loss']}, gradient norm {fault['gradient_norm']})"
    return f"{problem}{on_ranks}, {samples}: {_ACTION_TEXTS[fault['action']]}"
