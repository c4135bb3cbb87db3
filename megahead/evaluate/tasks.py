"""lm-eval tasks over local files: which shipped definition each one follows, and where its data lies.

A new task is a line in `TASKS`, if its file has the fields that the shipped definition reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megahead.errors import DataError, FieldError


@dataclass(frozen=True)
class LocalTask:
    """A task that lm-eval ships, bound to a file of ours."""

    definition: str
    """The shipped YAML whose prompt and metrics are used, below lm_eval/tasks."""

    file: str | None
    """Where the examples are in a data folder; None: only a file named by the user."""

    field: str = "text"
    """What each line (a JSON object) must have."""


TASKS: Mapping[str, LocalTask] = {
    "cloze": LocalTask("lambada/lambada_openai.yaml", file=None),
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", file="lambada/lambada_test.jsonl"),
}
"""By name. `cloze`: any jsonl of {"text"}, the last word is predicted, scored exactly as lambada_openai."""


def task_files(names: Sequence[str], data: Path | None = None, cloze: Path | None = None) -> dict[str, Path]:
    """The file of each task, in the folder `data` or named (`cloze`), read through once; FieldError or DataError."""
    files = {}
    for name in names:
        if name not in TASKS:
            raise FieldError("--tasks", f"name tasks of {', '.join(TASKS)}", got=name)
        files[name] = _file_of(name, data, cloze)
        _check_lines(files[name], TASKS[name].field)
    return files


def task_config(name: str, file: Path, cache: Path) -> dict[str, Any]:
    """The task in lm-eval's terms: the shipped YAML, its data replaced by `file`."""
    return {
        "include": str(_shipped() / TASKS[name].definition),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}, "cache_dir": str(cache)},
        "tag": None,
    }


def _file_of(name: str, data: Path | None, cloze: Path | None) -> Path:
    place = TASKS[name].file
    if place is None:
        if cloze is None:
            raise FieldError("--cloze", f"name the file of task {name}", got="missing")
        return cloze
    if data is None:
        raise FieldError("--data", f"name the folder that holds {place} (task {name})", got="missing")
    return data / place


def _check_lines(file: Path, field: str) -> None:
    """Reads the file once: every line an object with `field`, and at least one."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise DataError(f"`{file}` must be a readable jsonl file, but is not; check the path.") from None
    for number, line in enumerate(lines, 1):
        if field not in _object(line):
            raise DataError(f"`{file}` must hold JSON objects with a `{field}`, but line {number} is none.")
    if not lines:
        raise DataError(f"`{file}` must hold examples, but is empty.")


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shipped() -> Path:
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DataError("lm-eval must be installed for its tasks, but is not; run `make install`.")
    return Path(spec.origin).parent / "tasks"
