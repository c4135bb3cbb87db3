"""Runs all measurements that need a GPU, within a time budget, and writes a report.

python tools/gpu_report.py                                     45 minutes, without trainings
python tools/gpu_report.py --dataset build/gpu-text/text       with trainings, on the dataset of `make gpu-text`
python tools/gpu_report.py --only loss step-70m --minutes 5
python tools/gpu_report.py --dry                               tiny, on the CPU, as a test

Parts run by priority: what a launch costs the host; whole steps of the engine, headless against vanilla, of three
models and vocabularies, and with single settings changed; the loss beside third-party kernels; steps
without an engine, plain and compiled; DeepSpeed's overhead; waits for GPUs; step profiles; with a text (of at most
50,277 ids) real trainings of 70 M parameters with 50,277 and 131,072 ids, of 80 M tokens each at 25 % MFU of an H100,
which also share the spare time; more steps and waits; and the tests that need a GPU. Each is a separate process with a
time limit.
report.json and report.md are rewritten after each part; a second call runs the parts that are missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from rich.console import Console

from benchmarks.command import PYTHIA_VOCABULARY, zipf_tokens
from megahead import __version__
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import FieldError, existing_path, run_command
from megahead.files import write_atomically
from megahead.report.read import read_metrics
from megahead.report.tables import terminal, to_markdown, to_rich
from megahead.wording import format_duration, to_milliseconds

ZIPF, ZIPF_TOKENS, DRY_TOKENS = "zipf", 2_000_000, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="for all parts together (default: 45)")
    parser.add_argument("--folder", type=Path, help="default: runs/gpu-report, of a dry run runs/gpu-report-dry")
    parser.add_argument("--dataset", type=_prefix, metavar="PREFIX", help="what to train on, as preprocess.py made it")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    parser.add_argument("--again", action="store_true", help="also measure what an earlier call has measured")
    parser.add_argument("--dry", action="store_true", help="everything tiny, on the CPU")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path("runs/gpu-report-dry" if arguments.dry else "runs/gpu-report")).absolute()
    parts = build_parts(DRY if arguments.dry else FULL, folder, arguments.dataset)
    console = terminal()
    if arguments.list:
        console.print(to_rich([{"part": part.name, "about, s": part.seconds, "": part.question} for part in parts]))
        return
    if unknown := set(arguments.only) - {part.name for part in parts}:
        raise FieldError("--only", "name parts that --list has", got=", ".join(sorted(unknown)))
    session = PartRunner(folder, console, title=DRY_RUN if arguments.dry else ON_A_GPU, again=arguments.again)
    if arguments.dataset is None:
        write_zipf(folder / ZIPF, DRY_TOKENS if arguments.dry else ZIPF_TOKENS)
    wanted = [part for part in parts if not arguments.only or part.name in arguments.only]
    session.run_parts(wanted, arguments.minutes * 60)
    console.print(f"wrote {folder}/report.md and report.json", soft_wrap=True)


def _prefix(text: str) -> Path:
    """The absolute prefix of a dataset, since parts run in the project's root."""
    return existing_path(f"{text}.idx").absolute().with_suffix("")


# The parts. Nothing here imports torch, which would take GPU memory.


RESULT, SECONDS = "{result}", "{seconds}"  # in a part's command: the JSON file to write, and its time limit
STARTUP_SECONDS = 60.0  # subtracted from `SECONDS`: imports, compiling, the last evaluation, saving
State = Literal["measured", "failed", "too long", "left out"]


@dataclass(frozen=True)
class Outcome:
    """The result of a part."""

    name: str
    question: str
    command: list[str]  # the part's template, which identifies it in a later call
    state: State
    seconds: float = 0.0
    called: list[str] = field(default_factory=list)  # the command as it was run
    why: str = ""  # a sentence, unless the part was measured
    said: str = ""  # its output
    lines: list[dict[str, Any]] | None = None  # its JSON result, also if it failed afterwards


@dataclass(frozen=True)
class Part:
    """One question, answered by a command of this checkout."""

    name: str
    question: str
    command: tuple[str, ...]  # a script and its arguments
    seconds: float  # estimate on an H100, reserved for it; its limit is twice that
    packages: tuple[str, ...] = ()  # required; else the part is left out
    unsupported_reason: str = ""  # why it cannot run, if known beforehand

    @property
    def uses_spare_time(self) -> bool:
        """Whether it takes spare time beyond `seconds`, an equal share of what is left for such parts."""
        return any(SECONDS in word for word in self.command)

    def missing_requirement(self) -> str:
        """Why the part cannot run here; empty if it can."""
        if self.unsupported_reason:
            return self.unsupported_reason
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        verb = "are" if packages[1:] else "is"
        return f"{' and '.join(packages)} must be installed for it, but {verb} not." if packages else ""

    def outcome(self, state: State, **fields: Any) -> Outcome:
        return Outcome(self.name, self.question, list(self.command), state, **fields)


_DOCUMENT_TOKENS = 500


def write_zipf(prefix: Path, tokens: int) -> None:
    """Writes Zipf-distributed tokens, in documents that end with 0, unless they exist; nothing is trained on them."""
    if prefix.with_suffix(".idx").exists():
        return
    shape = tokens // _DOCUMENT_TOKENS, _DOCUMENT_TOKENS
    documents = zipf_tokens(PYTHIA_VOCABULARY, shape, seed=0, excluded_id=0)
    documents[:, -1] = 0
    with IndexedDatasetWriter(prefix, vocab_size=PYTHIA_VOCABULARY) as writer:
        for document in documents:
            writer.add_document(document)


NEEDS_TEXT = "a text must be given for it by --dataset, but is not."
PREFIX, WHOLE_STEP_PREFIX = "train-", "whole-"  # of names of parts
TOKENS, TRAINING_MFU = 80_000_000, 0.25  # the MFU is assumed: TOKENS fit into a training's seconds
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FULL, DRY = PLAN["full"], PLAN["dry"]


def build_parts(scale: Mapping[str, Any], folder: Path, dataset: Path | None = None) -> list[Part]:
    """All parts of `scale` (FULL, or DRY for the CPU), on the text with the prefix `dataset`, beside which is its
    `-validation`, or else on that of `write_zipf` in `folder`, where runs are, too."""
    parts: list[Part] = []
    for kind, name, options, seconds, *more_options in scale["parts"]:
        words, device = " ".join([options, *more_options]).split(), scale["device"].split()
        set_options = [option for word in words for option in ("--set", word)]
        replacements = {"{options}": words, "{set}": set_options, "{device}": device, "{where}": device[:2]}
        template, values = PLAN["kinds"][kind], {"name": name, "text": dataset or folder / ZIPF, "folder": folder}
        values |= {"words": str(name).replace("-", " "), "result": RESULT, "seconds": SECONDS}
        command = [
            argument
            for word in template["command"].split()
            for argument in replacements.get(word) or [word.format(**values)]
        ]
        parts.append(
            Part(
                f"{kind}-{name}".removesuffix("-"),
                template["question"].format(**values),
                tuple(word for word in command if word not in replacements),
                scale["slower"] * seconds,
                tuple(template.get("packages", ())),
                NEEDS_TEXT if kind == "train" and dataset is None else "",
            )
        )
    return parts


# Running parts.


PACKAGES = (
    *("torch", "triton", "deepspeed", "transformers"),
    *("liger-kernel", "cut-cross-entropy", "flash-attn", "flash-attn-4"),
)


def describe_machine() -> dict[str, str]:
    """Date, GPU and versions by name, without importing torch."""
    description = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "Python": platform.python_version()}
    commands = {
        "GPU": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "megahead": ("git", "describe", "--always", "--dirty"),
    }
    for name, command in commands.items():
        description[name] = "unknown"
        with suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            description[name] = result.stdout.strip()
    description["megahead"] = f"{__version__}, {description['megahead']}"
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            description[name] = importlib.metadata.version(name)
    return description


ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 12
_TERM_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# (script and arguments, file for stdout, file for stderr, time limit) -> exit code
Launch = Callable[[Sequence[str], Path, Path, float], int | None]


def launch(command: Sequence[str], stdout_path: Path, stderr_path: Path, limit: float) -> int | None:
    """Runs Python on `command` in this checkout; returns the exit code, or None after `limit` seconds.

    It has its own process group, which is killed at the end.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with stdout_path.open("wb") as output, stderr_path.open("wb") as errors:
        options: Any = {"stdout": output, "stderr": errors, "env": environment, "cwd": ROOT}
        process = subprocess.Popen([sys.executable, *command], start_new_session=True, **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_GRACE_SECONDS)


def run_part(part: Part, folder: Path, limit: float, launch: Launch = launch) -> Outcome:
    """Runs `part` for at most `limit` seconds; its output and result go to files in `folder`."""
    result, stdout_path, stderr_path = (folder / f"{part.name}.{suffix}" for suffix in ("json", "txt", "errors.txt"))
    result.unlink(missing_ok=True)
    shutil.rmtree(folder / "runs" / part.name, ignore_errors=True)  # else an earlier run would resume, at its end
    seconds = str(round(max(limit - STARTUP_SECONDS, 1)))
    command = [word.replace(RESULT, str(result)).replace(SECONDS, seconds) for word in part.command]
    start, lines = time.monotonic(), None
    code = launch(command, stdout_path, stderr_path, limit)
    taken = time.monotonic() - start
    with suppress(OSError, ValueError):  # no result, or an incomplete one
        lines = json.loads(result.read_text(encoding="utf-8"))
    state, why = _describe_failure(code, limit, stdout_path, stderr_path) if code != 0 else ("measured", "")
    output = stdout_path.read_text(encoding="utf-8", errors="replace")
    return part.outcome(state, why=why, seconds=taken, called=command, said=output, lines=lines)


def _describe_failure(code: int | None, limit: float, stdout_path: Path, stderr_path: Path) -> tuple[State, str]:
    """The state and a sentence: the command's `error: ...` line, else its last lines."""
    if code is None:
        return "too long", f"it had not ended after {format_duration(limit)}"
    if code == -signal.SIGKILL:
        return "failed", "it was killed, most likely for the machine's memory"
    texts = [path.read_text(errors="replace") for path in (stdout_path, stderr_path)]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "failed", errors[-1] if errors else "\n".join([f"it ended with code {code}:", *lines[-LAST_LINES:]])


ON_A_GPU, DRY_RUN = "Measured on a GPU", "A dry run on a CPU: no number here says anything about a GPU"
MIN_SECONDS = 20.0  # the least for which a part is started


class PartRunner:
    """Runs parts in `folder`; reuses what the same command measured there before, unless `again`."""

    def __init__(
        self, folder: Path, console: Console, *, title: str = ON_A_GPU, again: bool = False, launch: Launch = launch
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.console, self._title, self._launch = folder, console, title, launch
        self._report, self._machine, self._again = folder / "report.json", describe_machine(), again
        earlier = [] if not self._report.exists() else json.loads(self._report.read_bytes())["parts"]
        self.outcomes = {part["name"]: Outcome(**part) for part in earlier if part["state"] == "measured"}

    def run_parts(self, parts: Sequence[Part], seconds: float) -> None:
        """Runs `parts` within so many seconds, and writes `report.json` and `report.md` after each."""
        deadline = time.monotonic() + seconds
        measured = {(outcome.name, *outcome.command) for outcome in self.outcomes.values() if not self._again}
        todo = [part for part in parts if (part.name, *part.command) not in measured]
        if len(todo) < len(parts):
            self._print(f"{len(parts) - len(todo)} of {len(parts)} parts are there from an earlier call")
        for index, part in enumerate(todo, 1):
            seconds_left = deadline - time.monotonic()
            takes = "takes the time left" if part.uses_spare_time else f"about {format_duration(part.seconds)}"
            left = format_duration(max(seconds_left, 0))
            self._print(f"▸ {part.name} [{index}/{len(todo)}] {part.question} ({takes}; {left} left)")
            outcome = self.outcomes[part.name] = self._run_part(part, seconds_left, todo[index - 1 :])
            mark, why = ("✓", "") if outcome.state == "measured" else ("✗", f": {outcome.why}")
            self._print(f"{mark} {part.name} {outcome.state} ({format_duration(outcome.seconds)}){why}")
            self._save()
        self._save()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _run_part(self, part: Part, seconds_left: float, upcoming: Sequence[Part]) -> Outcome:
        """Runs `part`, or leaves it out; `upcoming`: parts from this one on."""
        if reason := part.missing_requirement():
            return part.outcome("left out", why=reason)
        reserved, least = 2 * part.seconds, MIN_SECONDS
        if part.uses_spare_time:  # spare time is split among such parts
            spare = seconds_left - sum(other.seconds for other in upcoming)
            reserved = part.seconds + max(spare, 0) / sum(other.uses_spare_time for other in upcoming)
            least += STARTUP_SECONDS
        limit = min(seconds_left, reserved)
        if limit < least:
            left = format_duration(max(seconds_left, 0))
            return part.outcome("left out", why=f"no time was left for it; {left} were.")
        return run_part(part, self.folder, limit, self._launch)

    def _save(self) -> None:
        outcomes = list(self.outcomes.values())
        content = {"machine": self._machine, "parts": [asdict(outcome) for outcome in outcomes]}
        write_atomically(self._report, json.dumps(content, indent=1) + "\n")
        write_atomically(self.folder / "report.md", render_page(self._title, self._machine, outcomes, self.folder))


# The page: summary tables of steps and trainings, then every part with its output.


def step_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each pair of headless and vanilla steps: speed-up, ratio of FLOPs, and headless utilization."""
    rows = []
    for outcome in outcomes:
        line_by_objective = {str(line.get("objective")): line for line in outcome.lines or [] if "GFLOP" in line}
        for suffix in ("", ", compiled"):
            headless, vanilla = line_by_objective.get(f"headless{suffix}"), line_by_objective.get(f"vanilla{suffix}")
            if headless and vanilla:
                speedup, flops_ratio = (vanilla[name] / headless[name] for name in ("ms", "GFLOP"))
                row = {"part": outcome.name + suffix, "headless, ms": headless["ms"], "vanilla, ms": vanilla["ms"]}
                row |= {"times as fast": round(speedup, 2), "by operations": round(flops_ratio, 2)}
                row["of it"] = f"{speedup / flops_ratio:.0%}"
                rows.append(row | {name: headless.get(name) for name in ("MFU", "of rate", "loss", "peak MB")})
    return rows


def training_rows(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each SIZE with both `train-SIZE-headless` and `train-SIZE-vanilla` in `measured`.

    Held-out perplexities are those at the end of the shorter run, interpolated between evaluations."""
    rows = []
    for name in measured:
        size, vanilla = name.removeprefix(PREFIX).removesuffix("-headless"), name.replace("-headless", "-vanilla")
        if not (name.startswith(PREFIX) and name.endswith("-headless") and vanilla in measured):
            continue
        runs = {"headless": read_metrics(folder / "runs" / name), "vanilla": read_metrics(folder / "runs" / vanilla)}
        row: dict[str, Any] = {"model": size}
        for axis, unit, scale in (("tokens", "M tokens", 1e6), ("seconds", "s", 1)):
            end = min(run.validation[-1][axis] for run in runs.values())
            row[unit] = round(end / scale, 1)
            for objective, run in runs.items():
                positions, scores = ([record[name] for record in run.validation] for name in (axis, "perplexity"))
                row[f"{objective} after these {axis}"] = exp(float(np.interp(end, positions, np.log(scores))))
        for objective, run in runs.items():
            last = run.training[-1]
            row[f"{objective}, tokens/s"] = round(last["tokens"] / last["seconds"])
            row |= {f"{objective}, MFU": f"{last['mfu']:.1%}"} if "mfu" in last else {}
        rows.append(row)
    return rows


def whole_rows(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each part of whole steps: the median step of the run's second half, and vanilla's time over it."""
    seconds_by_name: dict[str, float] = {}
    for name in (name for name in measured if name.startswith(WHOLE_STEP_PREFIX)):
        ends = [record["seconds"] for record in read_metrics(folder / "runs" / name).training]
        seconds_by_name[name] = float(np.median(np.diff(ends)[-(len(ends) // 2) :]))
    rows: list[dict[str, Any]] = []
    for name, seconds in seconds_by_name.items():
        vanilla = seconds_by_name.get(name.replace("headless", "vanilla")) if "headless" in name else None
        row = {"steps": name.removeprefix(WHOLE_STEP_PREFIX), "ms": to_milliseconds(seconds)}
        rows.append(row | {"vanilla takes": None if vanilla is None else f"{vanilla / seconds:.2f} times as long"})
    return rows


MAX_OUTPUT_CHARS = 20_000  # of a part's output on the page


def render_page(title: str, machine: Mapping[str, str], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Returns Markdown: summary tables, then every part with its command and output. `folder`: of the training runs."""
    measured = [outcome.name for outcome in outcomes if outcome.state == "measured"]
    part_rows = [
        {"part": one.name, "state": one.state, "took": format_duration(one.seconds), "because": one.why.split("\n")[0]}
        for one in outcomes
    ]
    tables = {
        "Whole steps of the engine": whole_rows(folder, measured),
        "Steps, headless against vanilla": step_rows(outcomes),
        "Trainings, headless against vanilla": training_rows(folder, measured),
        "All parts": part_rows,
    }
    blocks = [f"# {title}\n", to_markdown([{"": name, "is": value} for name, value in machine.items()])]
    blocks += [f"## {name}\n\n{to_markdown(rows)}" for name, rows in tables.items() if rows]
    for outcome in outcomes:
        command = shlex.join(["python", *(outcome.called or outcome.command)])
        output, error = outcome.said[-MAX_OUTPUT_CHARS:].strip("\n"), f"\n{outcome.why}" if outcome.why else ""
        blocks.append(f"## {outcome.name}: {outcome.question}\n\n```console\n$ {command}\n{output}{error}\n```\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    run_command(main)
