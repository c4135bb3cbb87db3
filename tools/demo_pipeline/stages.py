"""Runs named stages once: a second run reuses each finished stage whose settings, inputs and outputs are unchanged.

Beside its outputs a stage leaves a stamp `NAME.json`, written only when it has finished; it is removed before the
stage runs again, so that a killed stage is never taken for a finished one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megahead.errors import FieldError
from megahead.files import write_atomically

# The decoders of the demo, by the settings that make them; all have as many blocks, as wide
MODELS: Mapping[str, Sequence[str]] = {"pythia": (), "llama": ("model.family=llama", "model.activation=silu")}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the demo; a setting is `a.b=c` over `configs/demo-NAME.yaml`."""

    name: str
    folder: str  # where it lies, beside the checkout's other folders
    # Of the installed source files whose documentation is read, drawn by hash; None: every file
    source_bytes: int | None = None
    held_out: float = 0.04  # share of these files that no model learns from
    tokenizer_bytes: int = 20_000_000  # of text that the tokenizer is made from
    settings: Sequence[str] = ()  # of every run
    settings_of: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of one run, by its name

    def of(self, model: str) -> Size:
        """The same for another of `MODELS`, in a folder of its own."""
        if not MODELS[model]:
            return self
        settings = [*self.settings, *MODELS[model]]
        return replace(self, name=f"{self.name} {model}", folder=f"{self.folder}-{model}", settings=settings)

    def claim(self, folder: Path) -> None:
        """Keeps `folder` for demos of this size: FieldError where one of another size lies."""
        mark, stages = folder / "size.txt", folder / "stages"
        unmarked = FULL.name if stages.exists() else self.name
        lying = mark.read_text(encoding="utf-8").strip() if mark.exists() else unmarked
        if lying != self.name:
            rule = f"hold no demo but a {self.name} one"
            raise FieldError("--folder", rule, got=f"{folder} with a {lying} one", hint="name another, or none")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(self.name + "\n", encoding="utf-8")


_FEW_STEPS = ("training.steps=160", "schedule.warmup_steps=20", "training.checkpoint_every=80")

FULL = Size(name="full", folder="demo")

# The same model as in full, on a sixth of the text
QUICK = Size(
    name="quick",
    folder="demo-quick",
    source_bytes=40_000_000,
    held_out=0.15,
    tokenizer_bytes=5_000_000,
    settings=["training.evaluate_samples=128"],
    settings_of={
        "headless": [*_FEW_STEPS, "training.evaluate_every=40"],
        "vanilla": _FEW_STEPS,
        "head": ["training.steps=40", "training.evaluate_every=20"],
    },
)


@dataclass(frozen=True)
class Finished:
    """How a stage ended: `seconds` is what its work took, in this run or in the one that is reused."""

    name: str
    seconds: float
    result: str
    reused: bool = False


class Stages:
    """Runs stages one after the other and remembers their times; stamps live in `folder`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.finished: list[Finished] = []

    def run(
        self,
        name: str,
        work: Callable[[], str],
        *,
        settings: Mapping[str, Any] | None = None,
        inputs: Sequence[Path] = (),
        outputs: Sequence[Path] = (),
    ) -> Finished:
        """Does `work`, which returns one line about its result, or reuses an earlier run of it.

        Reused when `settings` (JSON values), and size and time of every file in `inputs` are what they were, and those
        of `outputs` have not changed since.
        """
        stamp = self.folder / f"{name}.json"
        key = _digest([settings or {}, _files(inputs)])
        finished = _reuse(stamp, name, key, outputs) or self._work(stamp, name, key, work, outputs)
        self.finished.append(finished)
        note = "reused" if finished.reused else "done"
        line = f"[green]✓[/] [bold]{name}[/] {note} ({duration(finished.seconds)}): {escape(finished.result)}"
        self.console.print(line, soft_wrap=True)
        return finished

    def table(self) -> Table:
        """The time of every stage so far, and their sum."""
        table = Table(box=None, header_style="bold", show_footer=True, pad_edge=False)
        spent = sum(stage.seconds for stage in self.finished if not stage.reused)
        table.add_column("stage", footer="this run")
        table.add_column("time", footer=duration(spent), justify="right")
        table.add_column("result")
        for stage in self.finished:
            time_spent = "reused" if stage.reused else duration(stage.seconds)
            table.add_row(stage.name, time_spent, escape(stage.result))
        return table

    def _work(self, stamp: Path, name: str, key: str, work: Callable[[], str], outputs: Sequence[Path]) -> Finished:
        stamp.unlink(missing_ok=True)
        self.console.print(f"[cyan]▸[/] [bold]{name}[/]")
        start = time.monotonic()
        result = work()
        finished = Finished(name, time.monotonic() - start, result)
        record = {"key": key, "outputs": _digest(_files(outputs)), "seconds": finished.seconds, "result": result}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(stamp, json.dumps(record, indent=1) + "\n")
        return finished


def duration(seconds: float) -> str:
    """Seconds as people read them: `0.4 s`, `42 s`, `3 min 07 s`."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _reuse(stamp: Path, name: str, key: str, outputs: Sequence[Path]) -> Finished | None:
    try:
        record = json.loads(stamp.read_text(encoding="utf-8"))
        unchanged = record["key"] == key and record["outputs"] == _digest(_files(outputs))
        return Finished(name, record["seconds"], record["result"], reused=True) if unchanged else None
    except (OSError, ValueError, KeyError, TypeError):  # never run, or a stamp of another kind
        return None


def _files(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of every file that `paths` name or contain; a missing one has size -1."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                status = file.stat() if file.exists() else None
                found.append((str(file), status.st_size if status else -1, status.st_mtime_ns if status else 0))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
