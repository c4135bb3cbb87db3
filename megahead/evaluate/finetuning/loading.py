"""Loads a task's examples from published files or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megahead.errors import DataError, FieldError
from megahead.evaluate.finetuning.examples import Example, Published
from megahead.evaluate.finetuning.task_table import TASKS, XNLI_LANGUAGES, Task


@dataclass(frozen=True)
class TaskData:
    """A task's examples, ready to be encoded."""

    name: str
    task: Task
    train: Sequence[Example]

    evaluation_sets: Mapping[str, Sequence[Example]]
    """By name: labelled dev splits. As in the paper, the best epoch is chosen on the first, which is also reported."""

    halved: bool
    """Whether half of the dev split is `train`, because there is no training split."""

    short: int = 0
    """Lines of the files that lacked a column and were left out."""

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all examples."""
        content = repr((self.train, sorted(self.evaluation_sets.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sources:
    """Where rows come from."""

    folder: Path | None
    """Folder of published files; None for the Hugging Face hub."""

    hub: str = ""
    """Prefix of every repository's name: a folder with copies of them."""

    def splits(self, name: str) -> tuple[Published | None, Published]:
        """Rows to train on (None without a training split) and to evaluate on. DataError if there is neither."""
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
        train = replace(form.read(self.folder / form.train), source=form.train) if self._have(form.train) else None
        files = [form.read(self.folder / path) for path in form.test.split("+")]
        return train, Published(
            [row for file in files for row in file.rows], sum(file.short for file in files), form.test
        )

    def have(self, name: str) -> bool:
        """Whether the folder has the task's dev split."""
        return self.folder is None or any(self._have(form.test) for form in TASKS[name].files)

    def _have(self, paths: str) -> bool:
        return self.folder is not None and all((self.folder / path).is_file() for path in paths.split("+"))


def expand(names: Sequence[str], sources: Sources) -> list[str]:
    """Task names, with `glue`, `superglue` or `xnli` standing for all of their tasks in the folder."""
    chosen: dict[str, None] = {}
    for name in names:
        members = [task for task in TASKS if task.startswith(f"{name}/")]
        if name not in TASKS and not members:
            known = [task for task in TASKS if not task.startswith("xnli/")]
            raise FieldError("--task", f"name tasks of {', '.join(known)}, xnli/LANGUAGE", got=name)
        found = [task for task in members if sources.have(task)]
        if members and not found:
            raise DataError(f"`{sources.folder}` must hold files of a task of {name}, but holds none; check the path.")
        chosen |= dict.fromkeys(found or [name])
    return list(chosen)


def load_task(
    name: str, sources: Sources, *, max_train_rows: int | None = None, languages: Sequence[str] = XNLI_LANGUAGES
) -> TaskData:
    """The examples of a task; `xnli/fr` trains on French and is evaluated in French, then in the other `languages`.

    max_train_rows: at most this many, drawn at random, the same for every model and seed.
    Raises DataError for files that are missing or not as published.
    """
    data = _examples(name, sources)
    train, evaluation_sets, short = data.train, dict(data.evaluation_sets), data.short
    for language in languages if name.startswith("xnli/") else ():
        if language not in evaluation_sets and sources.have(f"xnli/{language}"):
            other = _examples(f"xnli/{language}", sources)
            evaluation_sets, short = {**evaluation_sets, **other.evaluation_sets}, short + other.short
    if max_train_rows is not None and len(train) > max_train_rows:
        train = random.Random(0).sample(train, max_train_rows)
    return replace(data, train=train, evaluation_sets=evaluation_sets, short=short)


def _examples(name: str, sources: Sources) -> TaskData:
    """Examples to train and to evaluate on: from two splits, or (without a training split) every other unit of one."""
    train, test = sources.splits(name)
    task, examples, split = TASKS[name], _build(name, test), name.split("/")[1]
    if train is not None:
        return TaskData(name, task, _build(name, train), {split: examples}, False, train.short + test.short)
    if test.short and task.rows_per_unit > 1:
        raise DataError(
            f"The files of {name} must have all columns to be cut in halves, but lack one in {test.short:,} lines; "
            "get them again."
        )
    units = [examples[k : k + task.rows_per_unit] for k in range(0, len(examples), task.rows_per_unit)]
    if len(units) < 2:
        raise DataError(f"The files of {name} must hold examples to be cut in halves, but hold {len(examples)}.")
    halves = [[example for part in units[first::2] for example in part] for first in (0, 1)]
    return TaskData(name, task, halves[0], {split: halves[1]}, True, test.short)


def _build(name: str, published: Published) -> list[Example]:
    task, examples = TASKS[name], list[Example]()
    for number, row in enumerate(published.rows, 1):
        try:
            examples.append(task.build(row, task.labels))
            if not all(isinstance(text, str | None) for text in (examples[-1].first, *examples[-1].seconds)):
                raise TypeError
        except (KeyError, ValueError, TypeError):
            known = ", ".join(task.labels) or "numbers"
            raise DataError(
                f"`{published.source}` must hold {name} as published (texts, and labels of {known}), but example "
                f"{number} is {str(dict(row))[:200]}."
            ) from None
    if not examples:
        raise DataError(f"The files of {name} must hold examples, but one of them is empty.")
    return examples


def _hub_rows(repository: str, configuration: str, split: str) -> Published:
    import datasets

    try:
        rows = [dict(row) for row in datasets.load_dataset(repository, configuration, split=split)]
        return Published(rows, source=f"{repository} ({configuration}, {split})")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"{repository} cannot be loaded from the Hugging Face hub: {reason}; download the files and name their "
            "folder with `--data`."
        ) from None
