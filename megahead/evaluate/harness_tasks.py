"""Tasks with local files: how each is scored (by a definition that lm-eval ships, or a function here), and its data.

A new task is a line in `TASKS`: its shipped YAML (or its score function), its file, and a reader of that file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megahead.errors import DataError, FieldError
from megahead.evaluate.bits_per_byte import bits_per_byte, documents
from megahead.evaluate.harness_rows import Reader, arc, boolq, crows_pairs, json_lines, passages, pubmedqa, qasper, race
from megahead.evaluate.minimal_pairs import accuracy_by, blimp
from megahead.evaluate.results import Score

if TYPE_CHECKING:
    from megahead.evaluate.language_models import LanguageModel


@dataclass(frozen=True)
class LocalTask:
    """A task that lm-eval ships, bound to a file of ours."""

    definition: str
    """The shipped YAML whose prompt and metrics are used, below lm_eval/tasks."""

    file: str | None
    """Where the examples are in a data folder, as published; None if the user must name a file."""

    read: Reader


@dataclass(frozen=True)
class OwnTask:
    """A task that is scored here, by the log-probabilities of whole texts."""

    file: str | None
    """As a `LocalTask`'s; may be a folder."""

    read: Callable[[Path, int | None], Sequence[Any]]
    """The examples, or the first of them up to a limit."""

    score: Callable[[LanguageModel, Any], list[Score]]

    for_encoders: bool
    """Whether encoders can be scored on it, by pseudo-log-likelihoods."""


_SCIQ = json_lines("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")

TASKS: Mapping[str, LocalTask | OwnTask] = {
    "cloze": LocalTask("lambada/lambada_openai.yaml", None, passages),
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", "lambada/lambada_test.jsonl", passages),
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
    "piqa": LocalTask("piqa/piqa.yaml", "eval/piqa/validation.jsonl", json_lines("goal", "sol1", "sol2", "label")),
    "openbookqa": LocalTask(
        "openbookqa/openbookqa.yaml",
        "eval/openbookqa/validation.jsonl",
        json_lines("question_stem", "choices", "answerKey"),
    ),
    "blimp": OwnTask("eval/blimp", blimp, accuracy_by("field"), for_encoders=True),
    "blimp_paradigms": OwnTask("eval/blimp", blimp, accuracy_by("UID"), for_encoders=True),
    "bits_per_byte": OwnTask(None, documents, bits_per_byte, for_encoders=False),
}
"""By name. `cloze`: any jsonl of {"text"}, of which the last word is predicted, scored exactly as lambada_openai.

`bits_per_byte`: any text that `megahead preprocess` reads.

`blimp`: accuracy over all of BLiMP's paradigms, and over those of each field of grammar (`field`); `blimp_paradigms`:
over all, and in each paradigm (`UID`).

`qasper_bool`: lm-eval's definition takes yes as the right answer of every question; do not trust its f1.
"""


def task_files(
    names: Sequence[str], data: Path | None = None, cloze: Path | None = None, text: Path | None = None
) -> dict[str, Path]:
    """The file of each task, in the folder `data` or given (`cloze`, `text`). Each is read once, to check it.

    Raises FieldError (its field is an option of `megahead eval-harness`) or DataError.
    """
    files = {}
    for name in names:
        if name not in TASKS:
            raise FieldError("--tasks", f"name tasks of {', '.join(TASKS)}", got=name)
        files[name] = _file_of(name, data, {"cloze": ("--cloze", cloze), "bits_per_byte": ("--text", text)})
        task_rows(name, files[name])
    return files


def require_for_encoder(names: Iterable[str]) -> None:
    """FieldError for a task that only a decoder can be scored on."""
    fit = [name for name, task in TASKS.items() if isinstance(task, OwnTask) and task.for_encoders]
    for name in names:
        if name not in fit:
            raise FieldError("--tasks", f"name tasks of {', '.join(fit)} for an encoder", got=name)


def task_rows(name: str, file: Path, limit: int | None = None) -> Sequence[Any]:
    """The (first `limit`) examples of a task, as its definition or score function reads them; DataError for a file that
    is not the task's."""
    task = TASKS[name]
    try:
        rows = task.read(file, limit) if isinstance(task, OwnTask) else task.read(file)[:limit]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"`{file}` must hold {name} as published, but an example differs ({error!r}).") from None
    if not rows:
        raise DataError(f"`{file}` must hold examples, but is empty.")
    return rows


def write_tasks(files: Mapping[str, Path], folder: Path) -> Path:
    """Writes definitions and rows of those tasks that lm-eval scores; returns the folder for its `--include_path`.

    The definitions name their data and lm-eval's shipped ones by absolute path, and share a cache in `folder`.
    """
    folder = folder.resolve()
    definitions = folder / "tasks"
    definitions.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        task = TASKS[name]
        if isinstance(task, OwnTask):
            continue
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in task_rows(name, file)), encoding="utf-8")
        content = {
            "include": str(_shipped() / task.definition),
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


def _file_of(name: str, data: Path | None, named: Mapping[str, tuple[str, Path | None]]) -> Path:
    place = TASKS[name].file
    if place is None:
        option, file = named[name]
        if file is None:
            raise FieldError(option, f"name the file of task {name}", got="missing")
        return file
    if data is None:
        raise FieldError("--data", f"name the folder that holds {place} (task {name})", got="missing")
    if not (data / place).exists():
        raise DataError(f"`{data}` must hold {place} for task {name}, but lacks it; get it or leave the task out.")
    return data / place


def _shipped() -> Path:
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DataError("lm-eval must be installed for its tasks, but is not; run `make install`.")
    return Path(spec.origin).parent / "tasks"
