"""GLUE, SuperGLUE and XNLI: their tasks, files, metrics and examples.

As in the paper, the diagnostic sets, MultiRC, ReCoRD and WSC are left out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megahead.errors import DataError, FieldError, require_at_least
from megahead.evaluate.harness_tasks import Row, json_lines, text_of
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
    """Tokens of a sequence; of a longer pair the longer text is cut."""

    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch_size", "epochs"):
            if getattr(self, name) <= 0:
                raise FieldError(f"--{name.replace('_', '-')}", "be above 0", got=getattr(self, name))
        require_at_least(0, weight_decay=self.weight_decay)
        require_at_least(8, max_length=self.max_length)


def paper_settings(task: str, loss: LossName | None = None, **changes: float | None) -> FineTuningSettings:
    """The paper's settings for a task (tables 11 and 13; XNLI as in its text), except for `changes` that are not None.

    GLUE and SuperGLUE: balanced at 1e-5 without decay, or regular at 5e-6 with 0.01. XNLI: regular, 2e-5, batches of
    128. The paper names no lengths: these are what its encoders read in pretraining.
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
class Published:
    """The rows of a file as published, or of its copy on the Hugging Face hub."""

    rows: list[Row]

    num_skipped: int = 0
    """Lines without all columns, skipped as by every loader of GLUE: QQP was published with some."""

    source: str = ""
    """The files, or the repository, for error messages."""


@dataclass(frozen=True)
class Example:
    """One question to a classifier."""

    first_text: str

    second_texts: tuple[str | None, ...]
    """The texts that `first_text` is paired with: for a class, one text or None; for a choice, all alternatives."""

    label: float
    """The right class or choice; a number on a scale for regression."""

    def __repr__(self) -> str:
        """The text that `TaskData.fingerprint` hashes: names of the fields are those of earlier results."""
        return f"Example(first={self.first_text!r}, seconds={self.second_texts!r}, label={self.label!r})"

    def num_characters(self, max_characters: int) -> int:
        """Number of characters of all its sequences, at most `max_characters` of each."""
        return sum(min(len(self.first_text) + len(text or ""), max_characters) for text in self.second_texts)


Reader = Callable[[Path], Published]
Builder = Callable[[Row, Sequence[str]], Example]


def objects(*fields: str) -> Reader:
    """A reader of one JSON object per line, which must have all of `fields`."""
    read = json_lines(*fields)
    return lambda file: Published(read(file))


def tsv(**columns: str | int) -> Reader:
    """A reader of tab-separated lines without quoting. `columns`: our name of a field to the column's name, or to its
    number if there is no header.

    Lines that lack one of the columns are left out and counted; DataError if most lines do.
    """

    def read(file: Path) -> Published:
        table = [line.rstrip("\r").split("\t") for line in text_of(file).split("\n") if line]
        headed = any(isinstance(column, str) for column in columns.values())
        header = table.pop(0) if headed and table else []
        wanted = ", ".join(map(str, columns.values()))
        try:
            places = {ours: header.index(it) if isinstance(it, str) else it for ours, it in columns.items()}
        except ValueError:
            raise DataError(f"`{file}` must begin with tab-separated columns {wanted}, but does not.") from None
        whole = [line for line in table if len(line) > max(places.values())]
        short = len(table) - len(whole)
        if short > len(whole):
            raise DataError(
                f"`{file}` must have tab-separated columns {wanted} in each line, but {short:,} of {len(table):,} "
                "lines lack one; get it again."
            )
        return Published([{name: line[place] for name, place in places.items()} for line in whole], short)

    return read


def word_in_context(file: Path) -> Published:
    """WiC in its own form: `X.data.txt` (word, part of speech, places, two sentences), its labels in `X.gold.txt`."""
    rows = tsv(word=0, sentence1=3, sentence2=4)(file).rows
    gold = text_of(file.with_name(file.name.replace(".data.", ".gold."))).split()
    if len(gold) != len(rows):
        raise DataError(
            f"`{file}` must have a label for each of its {pluralize(len(rows), 'line')}, but has {len(gold)}."
        )
    named = {"T": "true", "F": "false"}
    return Published([{**row, "label": named.get(label, label)} for row, label in zip(rows, gold, strict=True)])


def translated(file: Path) -> Published:
    """XNLI: premise, hypothesis and label; its machine-translated training files begin with a header."""
    found = tsv(premise=0, hypothesis=1, label=2)(file)
    labels = {"contradictory": "contradiction"}
    rows = [{**row, "label": labels.get(row["label"], row["label"])} for row in found.rows if row["label"] != "label"]
    return Published(rows, found.num_skipped)


def texts(first: str, second: str | None = None) -> Builder:
    """A builder of examples for the class of one text, or of a pair, given by their fields."""

    def build(row: Row, labels: Sequence[str]) -> Example:
        return Example(row[first], (None if second is None else row[second],), class_of(row, labels))

    return build


def similarity(row: Row, labels: Sequence[str]) -> Example:
    """STS-B: how similar two sentences are, 0 to 5."""
    return Example(row["sentence1"], (row["sentence2"],), float(row["label"]))


def alternatives(row: Row, labels: Sequence[str]) -> Example:
    """COPA: which of two sentences is the cause or the result of a premise."""
    question = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}[row["question"]]
    return Example(f"{row['premise']} {question}", (row["choice1"], row["choice2"]), class_of(row, labels))


def same_sense(row: Row, labels: Sequence[str]) -> Example:
    """WiC as a pair of texts, the word in question before the first: `carry: You must carry ...`."""
    return Example(f"{row['word']}: {row['sentence1']}", (row["sentence2"],), class_of(row, labels))


def class_of(row: Mapping[str, Any], labels: Sequence[str]) -> int:
    """A label's number: published as that number, as true or false, or by name; ValueError for none of these."""
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool):
        return range(len(labels)).index(label)
    return labels.index(str(label).lower())


# For each task how an example is built, its files, and its metrics.

XNLI_LANGUAGES = ("en", "ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")


@dataclass(frozen=True)
class Files:
    """Published files of a task, below the data folder."""

    train: str
    test: str
    """The labelled split that scores are reported on (dev); `+` joins two files."""

    read: Reader


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task, wherever its rows come from."""

    labels: tuple[str, ...]
    """Names of the classes or choices in the files, in the order of their numbers; none for regression."""

    build: Builder
    """Makes an example from a row."""

    files: tuple[Files, ...]
    """The forms in which it is published, the preferred one first."""

    hub: tuple[str, str, str]
    """Repository, configuration and labelled dev split on the Hugging Face hub."""

    metric: str = "accuracy"
    """What the paper reports; it also chooses the best epoch."""

    extra_metrics: tuple[str, ...] = ()
    """Other metrics that are reported."""

    rows_per_unit: int = 1
    """Neighbouring rows that belong together: XNLI has three questions for each premise."""

    def outputs(self) -> int:
        """Numbers that the classifier gives for a sequence: a score for each class, or one for the sequence."""
        return 1 if self.build in (similarity, alternatives) else len(self.labels)


_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


def _glue(folder: str, labels: tuple[str, ...], build: Builder, read: Reader, split: str = "", **metrics: Any) -> Task:
    """A task of GLUE. split: endings of its dev splits' names, `+` between them."""
    dev = "+".join(f"glue/{folder}/dev{ending}.tsv" for ending in split.split("+"))
    hub = "+".join(f"validation{ending}" for ending in split.split("+"))
    name = folder.lower().replace("-", "")
    files = (Files(f"glue/{folder}/train.tsv", dev, read),)
    return Task(labels=labels, build=build, files=files, hub=("nyu-mll/glue", name, hub), **metrics)


def _superglue(
    folder: str, labels: tuple[str, ...], build: Builder, fields: Sequence[str], *other: Files, **metrics: Any
) -> Task:
    """A task of SuperGLUE, by the fields of its JSON lines; `other` forms in which it is published."""
    lines = Files(f"superglue/{folder}/train.jsonl", f"superglue/{folder}/val.jsonl", objects(*fields, "label"))
    hub = ("aps/super_glue", folder.lower(), "validation")
    return Task(labels=labels, build=build, files=(lines, *other), hub=hub, **metrics)


def _xnli(language: str) -> Task:
    files = Files(f"xnli/multinli.train.{language}.tsv", f"xnli/dev-{language}.tsv", translated)
    return Task(
        labels=_NLI,
        build=texts("premise", "hypothesis"),
        files=(files,),
        hub=("facebook/xnli", language, "validation"),
        rows_per_unit=3,
    )


_COLA = tsv(label=1, sentence=3)
_SST2 = tsv(sentence="sentence", label="label")
_MRPC = tsv(label="Quality", sentence1="#1 String", sentence2="#2 String")
_STSB = tsv(sentence1="sentence1", sentence2="sentence2", label="score")
_QQP = tsv(question1="question1", question2="question2", label="is_duplicate")
_MNLI = tsv(premise="sentence1", hypothesis="sentence2", label="gold_label")
_QNLI = tsv(question="question", sentence="sentence", label="label")
_TWO_SENTENCES = tsv(sentence1="sentence1", sentence2="sentence2", label="label")
_WIC = Files("superglue/WiC/train/train.data.txt", "superglue/WiC/dev/dev.data.txt", word_in_context)
_PAIR, _NUMBERS, _TRUTH = texts("sentence1", "sentence2"), ("0", "1"), ("false", "true")
_OF_CB = ("entailment", "contradiction", "neutral")
_OF_COPA = ("premise", "choice1", "choice2", "question")

TASKS: Mapping[str, Task] = {
    "glue/cola": _glue("CoLA", _NUMBERS, texts("sentence"), _COLA, metric="matthews", extra_metrics=("accuracy",)),
    "glue/sst2": _glue("SST-2", _NUMBERS, texts("sentence"), _SST2),
    "glue/mrpc": _glue("MRPC", _NUMBERS, _PAIR, _MRPC, extra_metrics=("f1",)),
    "glue/stsb": _glue("STS-B", (), similarity, _STSB, metric="spearman", extra_metrics=("pearson",)),
    "glue/qqp": _glue("QQP", _NUMBERS, texts("question1", "question2"), _QQP, extra_metrics=("f1",)),
    "glue/mnli": _glue("MNLI", _NLI, texts("premise", "hypothesis"), _MNLI, "_matched+_mismatched"),
    "glue/qnli": _glue("QNLI", _ENTAILMENT, texts("question", "sentence"), _QNLI),
    "glue/rte": _glue("RTE", _ENTAILMENT, _PAIR, _TWO_SENTENCES),
    "glue/wnli": _glue("WNLI", _NUMBERS, _PAIR, _TWO_SENTENCES),
    "superglue/boolq": _superglue("BoolQ", _TRUTH, texts("question", "passage"), ("question", "passage")),
    "superglue/cb": _superglue(
        "CB", _OF_CB, texts("premise", "hypothesis"), ("premise", "hypothesis"), extra_metrics=("macro_f1",)
    ),
    "superglue/copa": _superglue("COPA", ("choice1", "choice2"), alternatives, _OF_COPA),
    "superglue/wic": _superglue("WiC", _TRUTH, same_sense, ("word", "sentence1", "sentence2"), _WIC),
    **{f"xnli/{language}": _xnli(language) for language in XNLI_LANGUAGES},
}
"""By name; `xnli/fr` trains on French."""


# Loads a task's examples from published files or from the Hugging Face hub.


@dataclass(frozen=True)
class TaskData:
    """A task's examples, ready to be encoded."""

    name: str
    task: Task
    train: Sequence[Example]

    evaluation_sets: Mapping[str, Sequence[Example]]
    """By name: labelled dev splits. As in the paper, the best epoch is chosen on the first, which is also reported."""

    trains_on_dev: bool
    """Whether half of the dev split is `train`, because there is no training split."""

    num_skipped: int = 0
    """Lines of the files that lacked a column and were skipped."""

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all examples."""
        content = repr((self.train, sorted(self.evaluation_sets.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DataSource:
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
        rows = [row for file in files for row in file.rows]
        return train, Published(rows, sum(file.num_skipped for file in files), form.test)

    def have(self, name: str) -> bool:
        """Whether the folder has the task's dev split."""
        return self.folder is None or any(self._have(form.test) for form in TASKS[name].files)

    def _have(self, paths: str) -> bool:
        return self.folder is not None and all((self.folder / path).is_file() for path in paths.split("+"))


def expand_task_names(names: Sequence[str], sources: DataSource) -> list[str]:
    """Task names, with `glue`, `superglue` or `xnli` standing for all of their tasks in the folder."""
    chosen: dict[str, None] = {}
    for name in names:
        members = [task for task in TASKS if task.startswith(f"{name}/")]
        if name not in TASKS and not members:
            known = [task for task in TASKS if not task.startswith("xnli/")]
            rule = f"name tasks of {', '.join(known)}, xnli/LANGUAGE"
            raise FieldError("--task", rule, got=name, hint=did_you_mean(name, known))
        found = [task for task in members if sources.have(task)]
        if members and not found:
            raise DataError(f"`{sources.folder}` must hold files of a task of {name}, but holds none; check the path.")
        chosen |= dict.fromkeys(found or [name])
    return list(chosen)


def load_task(
    name: str, sources: DataSource, *, max_train_rows: int | None = None, languages: Sequence[str] = XNLI_LANGUAGES
) -> TaskData:
    """The examples of a task; `xnli/fr` trains on French and is evaluated in French, then in the other `languages`.

    max_train_rows: at most this many, drawn at random, the same for every model and seed.
    Raises DataError for files that are missing or not as published.
    """
    data = _examples(name, sources)
    train, evaluation_sets, num_skipped = data.train, dict(data.evaluation_sets), data.num_skipped
    for language in languages if name.startswith("xnli/") else ():
        if language not in evaluation_sets and sources.have(f"xnli/{language}"):
            other = _examples(f"xnli/{language}", sources)
            evaluation_sets |= other.evaluation_sets
            num_skipped += other.num_skipped
    if max_train_rows is not None and len(train) > max_train_rows:
        train = random.Random(0).sample(train, max_train_rows)
    return replace(data, train=train, evaluation_sets=evaluation_sets, num_skipped=num_skipped)


def _examples(name: str, sources: DataSource) -> TaskData:
    """Examples to train and to evaluate on: from two splits, or (without a training split) every other unit of one."""
    train, test = sources.splits(name)
    task, examples, split = TASKS[name], _build(name, test), name.split("/")[1]
    if train is not None:
        return TaskData(name, task, _build(name, train), {split: examples}, False, train.num_skipped + test.num_skipped)
    if test.num_skipped and task.rows_per_unit > 1:
        raise DataError(
            f"The files of {name} must have all columns to be cut in halves, but lack one in {test.num_skipped:,} "
            "lines; get them again."
        )
    units = [examples[k : k + task.rows_per_unit] for k in range(0, len(examples), task.rows_per_unit)]
    if len(units) < 2:
        raise DataError(f"The files of {name} must hold examples to be cut in halves, but hold {len(examples)}.")
    halves = [[example for part in units[first::2] for example in part] for first in (0, 1)]
    return TaskData(name, task, halves[0], {split: halves[1]}, True, test.num_skipped)


def _build(name: str, published: Published) -> list[Example]:
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
