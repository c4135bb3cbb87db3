"""GLUE, SuperGLUE and XNLI: their tasks, files, metrics and examples.

As in the paper, the diagnostic sets, MultiRC, ReCoRD and WSC are left out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from megahead.errors import DataError, FieldError, require_at_least
from megahead.evaluate.harness_tasks import Row, jsonl_reader, read_text
from megahead.wording import did_you_mean, pluralize

# How a task is fine-tuned; the paper's values are the defaults.

LossName = Literal["balanced", "regular"]


@dataclass(frozen=True, kw_only=True)
class FineTuningSettings:
    """Settings of one task's runs; AdamW with a constant learning rate after a linear warm-up."""

    loss: LossName
    """Cross-entropy in which all classes (`balanced`) or all examples (`regular`) of a batch weigh the same."""

    learning_rate: float
    weight_decay: float
    """Weight decay of matrices."""

    batch_size: int
    epochs: int = 10

    warmup: float = 0.1
    """Share of all steps in which the learning rate grows."""

    max_length: int = 128
    """Tokens of a sequence; in a longer pair, the longer text is truncated."""

    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not isfinite(value):
                raise FieldError(f"--{name.replace('_', '-')}", "be a finite number", got=value)
        for name in ("learning_rate", "batch_size", "epochs"):
            if getattr(self, name) <= 0:
                raise FieldError(f"--{name.replace('_', '-')}", "be above 0", got=getattr(self, name))
        require_at_least(0, weight_decay=self.weight_decay)
        require_at_least(8, max_length=self.max_length)


def paper_settings(task: str, loss: LossName | None = None, **changes: float | None) -> FineTuningSettings:
    """The paper's settings for a task (tables 11 and 13; XNLI as in its text), except for `changes` that are not None.

    GLUE and SuperGLUE: balanced at 1e-5 without decay, or regular at 5e-6 with 0.01. XNLI: regular, 2e-5, batches of
    128. The paper names no length: the default `max_length` is that of its encoders' pretraining.
    """
    if task.startswith("xnli/"):
        chosen = FineTuningSettings(loss=loss or "regular", learning_rate=2e-5, weight_decay=0.0, batch_size=128)
    elif loss == "regular":
        chosen = FineTuningSettings(loss="regular", learning_rate=5e-6, weight_decay=0.01, batch_size=32)
    else:
        chosen = FineTuningSettings(loss="balanced", learning_rate=1e-5, weight_decay=0.0, batch_size=32)
    return replace(chosen, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


# Rows as they are published, and the examples a classifier reads: a text, the texts it is paired with, a label.


@dataclass(frozen=True)
class PublishedRows:
    """The rows of a file as published, or of its copy on the Hugging Face hub."""

    rows: list[Row]

    num_skipped: int = 0
    """Lines that lack a column, skipped as by every loader of GLUE: QQP was published with some."""

    source: str = ""
    """The files, or the repository, for error messages."""


@dataclass(frozen=True)
class Example:
    """One example for a classifier."""

    first_text: str

    second_texts: tuple[str | None, ...]
    """The texts that `first_text` is paired with: for classes or regression, one text or None; for choices, all
    alternatives."""

    label: float
    """The right class or choice; a number on a scale for regression."""

    def __repr__(self) -> str:
        """The text that `TaskData.fingerprint` hashes. It keeps old field names, so that stored results are found."""
        return f"Example(first={self.first_text!r}, seconds={self.second_texts!r}, label={self.label!r})"

    def num_characters(self, max_characters: int) -> int:
        """Number of characters of all its sequences, at most `max_characters` of each."""
        return sum(min(len(self.first_text) + len(text or ""), max_characters) for text in self.second_texts)


Reader = Callable[[Path], PublishedRows]
Builder = Callable[[Row, Sequence[str]], Example]


def tsv_reader(**columns: str | int) -> Reader:
    """Returns a reader of tab-separated lines without quoting. `columns`: for each field of a row, its column's name,
    or number if there is no header.

    Lines that lack one of the columns are skipped and counted; DataError if most lines do.
    """

    def read(file: Path) -> PublishedRows:
        table = [line.rstrip("\r").split("\t") for line in read_text(file).split("\n") if line]
        has_header = any(isinstance(column, str) for column in columns.values())
        header = table.pop(0) if has_header and table else []
        column_names = ", ".join(map(str, columns.values()))
        try:
            indices = {
                field: header.index(column) if isinstance(column, str) else column for field, column in columns.items()
            }
        except ValueError:
            raise DataError(f"`{file}` must begin with tab-separated columns {column_names}, but does not.") from None
        complete = [line for line in table if len(line) > max(indices.values())]
        num_skipped = len(table) - len(complete)
        if num_skipped > len(complete):
            raise DataError(
                f"`{file}` must have tab-separated columns {column_names} in each line, but {num_skipped:,} of "
                f"{len(table):,} lines lack one; get it again."
            )
        return PublishedRows([{name: line[index] for name, index in indices.items()} for line in complete], num_skipped)

    return read


def read_word_in_context(file: Path) -> PublishedRows:
    """Reads WiC's own format: `X.data.txt` (word, part of speech, positions, two sentences), labels in `X.gold.txt`."""
    rows = tsv_reader(word=0, sentence1=3, sentence2=4)(file).rows
    labels = read_text(file.with_name(file.name.replace(".data.", ".gold."))).split()
    if len(labels) != len(rows):
        raise DataError(
            f"`{file}` must have a label for each of its {pluralize(len(rows), 'line')}, but has {len(labels)}."
        )
    label_names = {"T": "true", "F": "false"}
    rows = [{**row, "label": label_names.get(label, label)} for row, label in zip(rows, labels, strict=True)]
    return PublishedRows(rows)


def read_xnli(file: Path) -> PublishedRows:
    """Reads XNLI: premise, hypothesis and label; its machine-translated training files start with a header."""
    published = tsv_reader(premise=0, hypothesis=1, label=2)(file)
    labels = {"contradictory": "contradiction"}
    rows = [row for row in published.rows if row["label"] != "label"]
    rows = [{**row, "label": labels.get(row["label"], row["label"])} for row in rows]
    return PublishedRows(rows, published.num_skipped)


def text_builder(first: str, second: str | None = None) -> Builder:
    """Returns a builder of examples to classify a text or a pair of texts, by the names of their fields."""

    def build(row: Row, labels: Sequence[str]) -> Example:
        return Example(row[first], (None if second is None else row[second],), class_index(row, labels))

    return build


def build_similarity(row: Row, labels: Sequence[str]) -> Example:
    """Builds an example of STS-B: how similar two sentences are, 0 to 5."""
    return Example(row["sentence1"], (row["sentence2"],), float(row["label"]))


def build_choices(row: Row, labels: Sequence[str]) -> Example:
    """Builds an example of COPA: which of two sentences is the cause or the result of a premise."""
    question = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}[row["question"]]
    return Example(f"{row['premise']} {question}", (row["choice1"], row["choice2"]), class_index(row, labels))


def build_word_sense(row: Row, labels: Sequence[str]) -> Example:
    """Builds an example of WiC as a pair of texts, with the word before the first: `carry: You must carry ...`."""
    return Example(f"{row['word']}: {row['sentence1']}", (row["sentence2"],), class_index(row, labels))


def class_index(row: Mapping[str, Any], labels: Sequence[str]) -> int:
    """Returns the index of a row's label, which is an index, true or false, or a name; ValueError for another."""
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool):
        return range(len(labels)).index(label)
    return labels.index(str(label).lower())


# For each task how an example is built, its files, and its metrics.

XNLI_LANGUAGES = ("en", "ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")


@dataclass(frozen=True)
class TaskFiles:
    """Published files of a task, below the data folder."""

    train: str
    dev: str
    """The labelled split that scores are reported on; `+` joins two files."""

    read: Reader


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task, wherever its rows come from."""

    labels: tuple[str, ...]
    """Names of the classes or choices in the files, in the order of their numbers; none for regression."""

    build: Builder
    """Makes an example from a row."""

    files: tuple[TaskFiles, ...]
    """Its published files; alternatives in order of preference."""

    hub: tuple[str, str, str]
    """Repository, configuration and labelled dev split on the Hugging Face hub."""

    metric: str = "accuracy"
    """The metric that the paper reports; it also selects the best epoch."""

    extra_metrics: tuple[str, ...] = ()
    """Other metrics that are reported."""

    rows_per_unit: int = 1
    """Consecutive rows that must not be separated: XNLI has three questions for each premise."""

    def num_outputs(self) -> int:
        """Number of the classifier's outputs for a sequence: a score for each class, or one for the sequence."""
        return 1 if self.build in (build_similarity, build_choices) else len(self.labels)


_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


def _glue_task(
    folder: str, labels: tuple[str, ...], build: Builder, read: Reader, dev: str = "", **metrics: Any
) -> Task:
    """Returns a task of GLUE. dev: suffixes of its dev splits' names, `+` between them."""
    dev_files = "+".join(f"glue/{folder}/dev{suffix}.tsv" for suffix in dev.split("+"))
    hub_split = "+".join(f"validation{suffix}" for suffix in dev.split("+"))
    name = folder.lower().replace("-", "")
    files = (TaskFiles(f"glue/{folder}/train.tsv", dev_files, read),)
    return Task(labels=labels, build=build, files=files, hub=("nyu-mll/glue", name, hub_split), **metrics)


def _superglue_task(
    folder: str, labels: tuple[str, ...], build: Builder, fields: Sequence[str], *other_files: TaskFiles, **metrics: Any
) -> Task:
    """Returns a task of SuperGLUE, by the fields of its JSON lines; `other_files`: alternatives to them."""
    train, dev = (f"superglue/{folder}/{split}.jsonl" for split in ("train", "val"))
    read = jsonl_reader(*fields, "label")
    jsonl_files = TaskFiles(train, dev, lambda file: PublishedRows(read(file)))
    hub = ("aps/super_glue", folder.lower(), "validation")
    return Task(labels=labels, build=build, files=(jsonl_files, *other_files), hub=hub, **metrics)


def _xnli_task(language: str) -> Task:
    files = TaskFiles(f"xnli/multinli.train.{language}.tsv", f"xnli/dev-{language}.tsv", read_xnli)
    build, hub = text_builder("premise", "hypothesis"), ("facebook/xnli", language, "validation")
    return Task(labels=_NLI, build=build, files=(files,), hub=hub, rows_per_unit=3)


_COLA = tsv_reader(label=1, sentence=3)
_SST2 = tsv_reader(sentence="sentence", label="label")
_MRPC = tsv_reader(label="Quality", sentence1="#1 String", sentence2="#2 String")
_STSB = tsv_reader(sentence1="sentence1", sentence2="sentence2", label="score")
_QQP = tsv_reader(question1="question1", question2="question2", label="is_duplicate")
_MNLI = tsv_reader(premise="sentence1", hypothesis="sentence2", label="gold_label")
_QNLI = tsv_reader(question="question", sentence="sentence", label="label")
_TSV_SENTENCE_PAIR = tsv_reader(sentence1="sentence1", sentence2="sentence2", label="label")
_WIC_FILES = TaskFiles("superglue/WiC/train/train.data.txt", "superglue/WiC/dev/dev.data.txt", read_word_in_context)
_SENTENCE_PAIR, _BINARY, _BOOLEAN = text_builder("sentence1", "sentence2"), ("0", "1"), ("false", "true")
_CB_LABELS = ("entailment", "contradiction", "neutral")
_COPA_FIELDS = ("premise", "choice1", "choice2", "question")

TASKS: Mapping[str, Task] = {
    "glue/cola": _glue_task(
        "CoLA", _BINARY, text_builder("sentence"), _COLA, metric="matthews", extra_metrics=("accuracy",)
    ),
    "glue/sst2": _glue_task("SST-2", _BINARY, text_builder("sentence"), _SST2),
    "glue/mrpc": _glue_task("MRPC", _BINARY, _SENTENCE_PAIR, _MRPC, extra_metrics=("f1",)),
    "glue/stsb": _glue_task("STS-B", (), build_similarity, _STSB, metric="spearman", extra_metrics=("pearson",)),
    "glue/qqp": _glue_task("QQP", _BINARY, text_builder("question1", "question2"), _QQP, extra_metrics=("f1",)),
    "glue/mnli": _glue_task("MNLI", _NLI, text_builder("premise", "hypothesis"), _MNLI, "_matched+_mismatched"),
    "glue/qnli": _glue_task("QNLI", _ENTAILMENT, text_builder("question", "sentence"), _QNLI),
    "glue/rte": _glue_task("RTE", _ENTAILMENT, _SENTENCE_PAIR, _TSV_SENTENCE_PAIR),
    "glue/wnli": _glue_task("WNLI", _BINARY, _SENTENCE_PAIR, _TSV_SENTENCE_PAIR),
    "superglue/boolq": _superglue_task("BoolQ", _BOOLEAN, text_builder("question", "passage"), ("question", "passage")),
    "superglue/cb": _superglue_task(
        "CB", _CB_LABELS, text_builder("premise", "hypothesis"), ("premise", "hypothesis"), extra_metrics=("macro_f1",)
    ),
    "superglue/copa": _superglue_task("COPA", ("choice1", "choice2"), build_choices, _COPA_FIELDS),
    "superglue/wic": _superglue_task("WiC", _BOOLEAN, build_word_sense, ("word", "sentence1", "sentence2"), _WIC_FILES),
    **{f"xnli/{language}": _xnli_task(language) for language in XNLI_LANGUAGES},
}
"""By name; `xnli/fr` trains on French."""


# Loads a task's examples from published files or from the Hugging Face hub.


@dataclass(frozen=True)
class TaskData:
    """A task's examples, ready to be encoded."""

    name: str
    task: Task
    train: Sequence[Example]

    evaluation_sets: Mapping[str, Iterable[Example]]
    """By name: labelled dev splits, or for retrieval the queries and texts of a `SearchData`. As in the paper, the
    first set both selects the best epoch and gives the reported scores."""

    trains_on_dev: bool
    """Whether half of the dev split is `train`, because there is no training split."""

    num_skipped: int = 0
    """Lines of the files that lacked a column and were skipped."""

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all examples."""
        content = repr((self.train, sorted(self.evaluation_sets.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def has_task(folder: Path | None, name: str) -> bool:
    """Whether a folder of published files has the task's dev split; the Hugging Face hub (None) has every one."""
    return folder is None or any(_has_files(folder, files.dev) for files in TASKS[name].files)


def _has_files(folder: Path, paths: str) -> bool:
    return all((folder / path).is_file() for path in paths.split("+"))


def _read_splits(
    folder: Path | None, name: str, *, only_dev: bool = False
) -> tuple[PublishedRows | None, PublishedRows]:
    """Returns rows to train on (None without a training split, or if `only_dev`) and to evaluate on. DataError
    without either."""
    task = TASKS[name]
    if folder is None:
        repository, configuration, dev = task.hub
        train = None if only_dev else _hub_rows(repository, configuration, "train")
        return train, _hub_rows(repository, configuration, dev)
    available = [files for files in task.files if _has_files(folder, files.dev)]
    if not available:
        paths = " or ".join(files.dev.replace("+", " and ") for files in task.files)
        raise DataError(f"`{folder}` must hold {paths} for task {name}, but lacks it.")
    files = next((files for files in available if _has_files(folder, files.train)), available[0])
    has_train = not only_dev and _has_files(folder, files.train)
    train = replace(files.read(folder / files.train), source=files.train) if has_train else None
    parts = [files.read(folder / path) for path in files.dev.split("+")]
    rows = [row for part in parts for row in part.rows]
    return train, PublishedRows(rows, sum(part.num_skipped for part in parts), files.dev)


def expand_task_names(names: Sequence[str], folder: Path | None, other_prefix: str = "") -> list[str]:
    """Returns task names, with `glue`, `superglue` and `xnli` replaced by all of their tasks in the folder; None is the
    Hugging Face hub. `other_prefix`: names of this prefix and a path are kept."""
    expanded: dict[str, None] = {}
    for name in names:
        members = [task for task in TASKS if task.startswith(f"{name}/")]
        if name not in TASKS and not members and not (other_prefix and name.startswith(other_prefix)):
            known = [task for task in TASKS if not task.startswith("xnli/")]
            others = f", {other_prefix}PATH" if other_prefix else ""
            rule = f"name tasks of {', '.join(known)}, xnli/LANGUAGE{others}"
            raise FieldError("--task", rule, got=name, hint=did_you_mean(name, known))
        available = [task for task in members if has_task(folder, task)]
        if members and not available:
            raise DataError(f"`{folder}` must hold files of a task of {name}, but holds none; check the path.")
        expanded |= dict.fromkeys(available or [name])
    return list(expanded)


def load_task(
    name: str, folder: Path | None, *, max_train_rows: int | None = None, languages: Sequence[str] = XNLI_LANGUAGES
) -> TaskData:
    """Loads a task's examples; `xnli/fr` trains on French and is evaluated in French, then in the other `languages`.

    max_train_rows: at most this many, a random sample that is the same for every model and seed.
    Raises DataError for files that are missing or not as published.
    """
    train, dev = _read_splits(folder, name)
    published = {name: dev}
    for other in (f"xnli/{language}" for language in languages if name.startswith("xnli/")):
        if other not in published and has_task(folder, other):
            _, published[other] = _read_splits(folder, other, only_dev=True)
    parts = {task: [_build_examples(task, rows)] for task, rows in published.items()}
    num_skipped = sum(rows.num_skipped for rows in published.values())
    if train is None:  # the translations of a dev split are cut as it is
        parts = {task: _halve(task, examples, published[task].num_skipped) for task, (examples,) in parts.items()}
        examples = parts[name][0]
    else:
        examples, num_skipped = _build_examples(name, train), num_skipped + train.num_skipped
    if max_train_rows is not None and len(examples) > max_train_rows:
        examples = random.Random(0).sample(examples, max_train_rows)
    evaluation_sets = {task.split("/")[1]: part[-1] for task, part in parts.items()}
    return TaskData(name, TASKS[name], examples, evaluation_sets, train is None, num_skipped)


def _halve(name: str, examples: list[Example], num_skipped: int) -> list[list[Example]]:
    """Two halves of a task's only split, each with every other unit."""
    size = TASKS[name].rows_per_unit
    if num_skipped and size > 1:
        raise DataError(
            f"The files of {name} must have all columns to be cut in halves, but lack one in {num_skipped:,} "
            "lines; get them again."
        )
    units = [examples[k : k + size] for k in range(0, len(examples), size)]
    if len(units) < 2:
        raise DataError(f"The files of {name} must hold examples to be cut in halves, but hold {len(examples)}.")
    return [[example for part in units[first::2] for example in part] for first in (0, 1)]


def _build_examples(name: str, published: PublishedRows) -> list[Example]:
    task, examples = TASKS[name], list[Example]()
    for number, row in enumerate(published.rows, 1):
        try:
            examples.append(task.build(row, task.labels))
            if not all(isinstance(text, str | None) for text in (examples[-1].first_text, *examples[-1].second_texts)):
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


def _hub_rows(repository: str, configuration: str, split: str) -> PublishedRows:
    import datasets

    try:
        rows = [dict(row) for row in datasets.load_dataset(repository, configuration, split=split)]
        return PublishedRows(rows, source=f"{repository} ({configuration}, {split})")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"{repository} cannot be loaded from the Hugging Face hub: {reason}; download the files and name their "
            "folder with `--data`."
        ) from None
