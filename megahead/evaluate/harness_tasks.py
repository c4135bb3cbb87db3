"""lm-eval tasks over local files: which shipped definition each one follows, and where its data is.

A new task is a line in `TASKS`: its shipped YAML, its file, and the reader that gives the fields the YAML reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from megahead.errors import DataError, FieldError
from megahead.evaluate.harness_rows import Reader, Row, arc, boolq, crows_pairs, lines, pubmedqa, qasper, race


@dataclass(frozen=True)
class LocalTask:
    """A task that lm-eval ships, bound to a file of ours."""

    definition: str
    """The shipped YAML whose prompt and metrics are used, below lm_eval/tasks."""

    file: str | None
    """Where the examples are in a data folder, as published; None: only a file named by the user."""

    read: Reader


_SCIQ = lines("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")

TASKS: Mapping[str, LocalTask] = {
    "cloze": LocalTask("lambada/lambada_openai.yaml", None, lines("text")),
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", "lambada/lambada_test.jsonl", lines("text")),
    "arc_easy": LocalTask("arc/arc_easy.yaml", "eval/ARC/ARC-e/ARC-Easy-Test.jsonl", arc),
    "arc_challenge": LocalTask("arc/arc_challenge.yaml", "eval/ARC/ARC-c/ARC-Challenge-Test.jsonl", arc),
    "boolq": LocalTask("super_glue/boolq/default.yaml", "superglue/BoolQ/val.jsonl", boolq),
    "crows_pairs_english": LocalTask(
        "crows_pairs/crows_pairs_english.yaml", "eval/crows_pairs/crows_pairs_anonymized.csv", crows_pairs
    ),
    "race": LocalTask("race/race.yaml", "eval/race/test-high.jsonl", race),
    "sciq": LocalTask("sciq/sciq.yaml", "eval/sciq/validation.jsonl", _SCIQ),
    "pubmedqa": LocalTask("pubmedqa/pubmedqa.yaml", "eval/pubmedqa/ori_pqal.json", pubmedqa),
    "qasper_bool": LocalTask("qasper/bool.yaml", "eval/qasper/qasper-test-v0.3.json", qasper),
    "piqa": LocalTask("piqa/piqa.yaml", "eval/piqa/validation.jsonl", lines("goal", "sol1", "sol2", "label")),
    "openbookqa": LocalTask(
        "openbookqa/openbookqa.yaml", "eval/openbookqa/validation.jsonl", lines("question_stem", "choices", "answerKey")
    ),
}
"""By name. `cloze`: any jsonl of {"text"}, the last word is predicted, scored exactly as lambada_openai.

`qasper_bool` counts every answer's right class as yes, as lm-eval ships it: its f1 is not to be trusted.
"""


def task_files(names: Sequence[str], data: Path | None = None, cloze: Path | None = None) -> dict[str, Path]:
    """The file of each task, in the folder `data` or named (`cloze`), read through once; FieldError or DataError."""
    files = {}
    for name in names:
        if name not in TASKS:
            raise FieldError("--tasks", f"name tasks of {', '.join(TASKS)}", got=name)
        files[name] = _file_of(name, data, cloze)
        task_rows(name, files[name])
    return files


def task_rows(name: str, file: Path) -> list[Row]:
    """Every example of a task, in the fields that its definition reads; DataError for a file that is not that."""
    try:
        rows = TASKS[name].read(file)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"`{file}` must hold {name} as published, but an example differs ({error!r}).") from None
    if not rows:
        raise DataError(f"`{file}` must hold examples, but is empty.")
    return rows


def write_tasks(files: Mapping[str, Path], folder: Path) -> Path:
    """Writes a definition and its rows for each task, for lm-eval's `--include_path`; returns the folder to name there.

    The definitions name their data and lm-eval's shipped ones by absolute path, and share a cache in `folder`.
    """
    folder = folder.resolve()
    definitions = folder / "tasks"
    definitions.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in task_rows(name, file)), encoding="utf-8")
        content = {
            "include": str(_shipped() / TASKS[name].definition),
            "task": name,
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        (definitions / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return definitions


def _file_of(name: str, data: Path | None, cloze: Path | None) -> Path:
    place = TASKS[name].file
    if place is None:
        if cloze is None:
            raise FieldError("--cloze", f"name the file of task {name}", got="missing")
        return cloze
    if data is None:
        raise FieldError("--data", f"name the folder that holds {place} (task {name})", got="missing")
    if not (data / place).is_file():
        raise DataError(f"`{data}` must hold {place} for task {name}, but lacks it; get it or leave the task out.")
    return data / place


def _shipped() -> Path:
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DataError("lm-eval must be installed for its tasks, but is not; run `make install`.")
    return Path(spec.origin).parent / "tasks"
