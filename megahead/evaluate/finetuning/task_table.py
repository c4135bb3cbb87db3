"""GLUE, SuperGLUE and XNLI: for each task how an example is built, its files, and its metrics.

As in the paper, the diagnostic sets, MultiRC, ReCoRD and WSC are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megahead.evaluate.finetuning.examples import (
    Builder,
    Reader,
    alternatives,
    objects,
    same_sense,
    similarity,
    texts,
    translated,
    tsv,
    word_in_context,
)

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

    also: tuple[str, ...] = ()
    """Other metrics that are reported."""

    rows_per_unit: int = 1
    """Neighbouring rows that belong together: XNLI asks three questions of each premise."""

    def outputs(self) -> int:
        """Numbers that the classifier gives for a sequence: a score for each class, or one for the sequence."""
        return 1 if self.build in (similarity, alternatives) else len(self.labels)


_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


def _glue(folder: str, read: Reader, test: str = "dev.tsv") -> tuple[Files]:
    joined = "+".join(f"glue/{folder}/{name}" for name in test.split("+"))
    return (Files(f"glue/{folder}/train.tsv", joined, read),)


def _superglue(folder: str, *fields: str) -> Files:
    return Files(f"superglue/{folder}/train.jsonl", f"superglue/{folder}/val.jsonl", objects(*fields, "label"))


def _xnli(language: str) -> Task:
    files = Files(f"xnli/multinli.train.{language}.tsv", f"xnli/dev-{language}.tsv", translated)
    return Task(
        labels=_NLI,
        build=texts("premise", "hypothesis"),
        files=(files,),
        hub=("facebook/xnli", language, "validation"),
        rows_per_unit=3,
    )


TASKS: Mapping[str, Task] = {
    "glue/cola": Task(
        labels=("0", "1"),
        build=texts("sentence"),
        files=_glue("CoLA", tsv(label=1, sentence=3)),
        hub=("nyu-mll/glue", "cola", "validation"),
        metric="matthews",
        also=("accuracy",),
    ),
    "glue/sst2": Task(
        labels=("0", "1"),
        build=texts("sentence"),
        files=_glue("SST-2", tsv(sentence="sentence", label="label")),
        hub=("nyu-mll/glue", "sst2", "validation"),
    ),
    "glue/mrpc": Task(
        labels=("0", "1"),
        build=texts("sentence1", "sentence2"),
        files=_glue("MRPC", tsv(label="Quality", sentence1="#1 String", sentence2="#2 String")),
        hub=("nyu-mll/glue", "mrpc", "validation"),
        also=("f1",),
    ),
    "glue/stsb": Task(
        labels=(),
        build=similarity,
        files=_glue("STS-B", tsv(sentence1="sentence1", sentence2="sentence2", label="score")),
        hub=("nyu-mll/glue", "stsb", "validation"),
        metric="spearman",
        also=("pearson",),
    ),
    "glue/qqp": Task(
        labels=("0", "1"),
        build=texts("question1", "question2"),
        files=_glue("QQP", tsv(question1="question1", question2="question2", label="is_duplicate")),
        hub=("nyu-mll/glue", "qqp", "validation"),
        also=("f1",),
    ),
    "glue/mnli": Task(
        labels=_NLI,
        build=texts("premise", "hypothesis"),
        files=_glue(
            "MNLI",
            tsv(premise="sentence1", hypothesis="sentence2", label="gold_label"),
            test="dev_matched.tsv+dev_mismatched.tsv",
        ),
        hub=("nyu-mll/glue", "mnli", "validation_matched+validation_mismatched"),
    ),
    "glue/qnli": Task(
        labels=_ENTAILMENT,
        build=texts("question", "sentence"),
        files=_glue("QNLI", tsv(question="question", sentence="sentence", label="label")),
        hub=("nyu-mll/glue", "qnli", "validation"),
    ),
    "glue/rte": Task(
        labels=_ENTAILMENT,
        build=texts("sentence1", "sentence2"),
        files=_glue("RTE", tsv(sentence1="sentence1", sentence2="sentence2", label="label")),
        hub=("nyu-mll/glue", "rte", "validation"),
    ),
    "glue/wnli": Task(
        labels=("0", "1"),
        build=texts("sentence1", "sentence2"),
        files=_glue("WNLI", tsv(sentence1="sentence1", sentence2="sentence2", label="label")),
        hub=("nyu-mll/glue", "wnli", "validation"),
    ),
    "superglue/boolq": Task(
        labels=("false", "true"),
        build=texts("question", "passage"),
        files=(_superglue("BoolQ", "question", "passage"),),
        hub=("aps/super_glue", "boolq", "validation"),
    ),
    "superglue/cb": Task(
        labels=("entailment", "contradiction", "neutral"),
        build=texts("premise", "hypothesis"),
        files=(_superglue("CB", "premise", "hypothesis"),),
        hub=("aps/super_glue", "cb", "validation"),
        also=("macro_f1",),
    ),
    "superglue/copa": Task(
        labels=("choice1", "choice2"),
        build=alternatives,
        files=(_superglue("COPA", "premise", "choice1", "choice2", "question"),),
        hub=("aps/super_glue", "copa", "validation"),
    ),
    "superglue/wic": Task(
        labels=("false", "true"),
        build=same_sense,
        files=(
            _superglue("WiC", "word", "sentence1", "sentence2"),
            Files("superglue/WiC/train/train.data.txt", "superglue/WiC/dev/dev.data.txt", word_in_context),
        ),
        hub=("aps/super_glue", "wic", "validation"),
    ),
    **{f"xnli/{language}": _xnli(language) for language in XNLI_LANGUAGES},
}
"""By name; `xnli/fr` trains on French."""
