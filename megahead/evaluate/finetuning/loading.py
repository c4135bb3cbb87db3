"""Brings a task's examples from published files or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megahead.errors import DataError, FieldError
from megahead.evaluate.finetuning.examples import Example
from megahead.evaluate.finetuning.task_table import TASKS, XNLI_LANGUAGES, Task
from megahead.evaluate.harness_rows import Row


@dataclass(frozen=True)
class TaskData:
    """A task's examples, ready to be encoded."""

    name: str
    task: Task
    train: Sequence[Example]

    tests: Mapping[str, Sequence[Example]]
    """Test sets by name; the first one chooses the best epoch."""

    halved: bool
    """Whether there was no training split, so that half of the test split trained."""

    @cached_property
    def stamp(self) -> str:
        """Changes with any example."""
        content = repr((self.train, sorted(self.tests.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sources:
    """Where rows come from."""

    folder: Path | None
    """Folder of published files; None: the Hugging Face hub."""

    hub: str = ""
    """Begins every repository's name, for copies of them in a folder."""

    def splits(self, name: str) -> tuple[list[Row] | None, list[Row]]:
        """Rows to train and to test on; None where there is no training split. DataError where there is nothing."""
        task = TASKS[name]
        if self.folder is None:
            repository, configuration, test = task.hub
            repository = self.hub + repository
            return _hub_rows(repository, configuration, "train"), _hub_rows(repository, configuration, test)
        trained = (form for form in task.files if self._have(form.train) and self._have(form.test))
        form = next(trained, None) or next((form for form in task.files if self._have(form.test)), None)
        if form is None:
            wanted = " or ".join(form.test.replace("+", " and ") for form in task.files)
            raise DataError(f"`{self.folder}` must hold {wanted} for task {name}, but lacks it.")
        train = form.read(self.folder / form.train) if self._have(form.train) else None
        return train, [row for path in form.test.split("+") for row in form.read(self.folder / path)]

    def have(self, name: str) -> bool:
        """Whether the task's test split is at hand."""
        return self.folder is None or any(self._have(form.test) for form in TASKS[name].files)

    def _have(self, paths: str) -> bool:
        return self.folder is not None and all((self.folder / path).is_file() for path in paths.split("+"))


def expand(names: Sequence[str], sources: Sources) -> list[str]:
    """Task names, with `glue`, `superglue` or `xnli` standing for all of theirs that are at hand."""
    chosen: dict[str, None] = {}
    for name in names:
        members = [task for task in TASKS if task.startswith(f"{name}/")]
        if name not in TASKS and not members:
            known = [task for task in TASKS if not task.startswith("xnli/")]
            raise FieldError("--task", f"name tasks of {', '.join(known)}, xnli/LANGUAGE", got=name)
        chosen |= dict.fromkeys([task for task in members if sources.have(task)] or [name])
    return list(chosen)


def load_task(
    name: str, sources: Sources, *, max_train_rows: int | None = None, languages: Sequence[str] = XNLI_LANGUAGES
) -> TaskData:
    """The examples of a task; `xnli/fr` trains on French and is tested in French, then in the other `languages`.

    max_train_rows: so many at most, the same ones for every model and seed, drawn at random.
    Raises DataError for files that are missing or not as published.
    """
    train, test, halved = _examples(name, sources)
    tests = {name.split("/")[1]: test}
    for language in languages if name.startswith("xnli/") else ():
        if language not in tests and sources.have(f"xnli/{language}"):
            tests[language] = _examples(f"xnli/{language}", sources)[1]
    if max_train_rows is not None and len(train) > max_train_rows:
        train = random.Random(0).sample(train, max_train_rows)
    return TaskData(name, TASKS[name], train, tests, halved)


def _examples(name: str, sources: Sources) -> tuple[list[Example], list[Example], bool]:
    """Examples to train on, to test on, and whether they are halves of one split, taken in turn."""
    train, test = sources.splits(name)
    examples = _build(name, test)
    if train is not None:
        return _build(name, train), examples, False
    unit = TASKS[name].unit
    units = [examples[k : k + unit] for k in range(0, len(examples), unit)]
    halves = [[example for part in units[first::2] for example in part] for first in (0, 1)]
    return halves[0], halves[1], True


def _build(name: str, rows: Sequence[Row]) -> list[Example]:
    task = TASKS[name]
    try:
        examples = [task.build(row, task.labels) for row in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"The files of {name} must be as published, but an example differs ({error!r}).") from None
    if not examples:
        raise DataError(f"The files of {name} must hold examples, but one of them is empty.")
    return examples


def _hub_rows(repository: str, configuration: str, split: str) -> list[Row]:
    import datasets

    try:
        return [dict(row) for row in datasets.load_dataset(repository, configuration, split=split)]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"`--data` must name a folder of files where the hub cannot be reached, but is missing, and {repository} "
            f"cannot be loaded: {reason}"
        ) from None
