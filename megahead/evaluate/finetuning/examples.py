"""Rows as they are published, and the examples a classifier reads: a text, the texts it is paired with, a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megahead.errors import DataError
from megahead.evaluate.harness_rows import Row, json_lines, text_of
from megahead.wording import counted

Builder = Callable[[Row, Sequence[str]], "Example"]


@dataclass(frozen=True)
class Published:
    """The rows of a file as published, or of its copy on the Hugging Face hub."""

    rows: list[Row]

    short: int = 0
    """Lines that lack a column and were left out, as every loader of GLUE does: QQP was published with some."""

    source: str = ""
    """The files, or the repository, for error messages."""


Reader = Callable[[Path], Published]


@dataclass(frozen=True)
class Example:
    """One question to a classifier."""

    first: str

    seconds: tuple[str | None, ...]
    """What `first` is paired with: for a class, one text or None; for a choice, all that can be chosen."""

    label: float
    """The right class or choice; a number on a scale for regression."""

    def characters(self, at_most: int) -> int:
        """Number of characters of all its sequences, at most `at_most` of each."""
        return sum(min(len(self.first) + len(second or ""), at_most) for second in self.seconds)


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
            f"`{file}` must have a label for each of its {counted(len(rows), 'line')}, but has {len(gold)}."
        )
    named = {"T": "true", "F": "false"}
    return Published([{**row, "label": named.get(label, label)} for row, label in zip(rows, gold, strict=True)])


def translated(file: Path) -> Published:
    """XNLI: premise, hypothesis and label; its machine-translated training files begin with a header."""
    found = tsv(premise=0, hypothesis=1, label=2)(file)
    labels = {"contradictory": "contradiction"}
    rows = [{**row, "label": labels.get(row["label"], row["label"])} for row in found.rows if row["label"] != "label"]
    return Published(rows, found.short)


def texts(first: str, second: str | None = None) -> Builder:
    """A builder of examples that ask for the class of one text, or of a pair, given by their fields."""

    def build(row: Row, labels: Sequence[str]) -> Example:
        return Example(row[first], (None if second is None else row[second],), class_of(row, labels))

    return build


def similarity(row: Row, labels: Sequence[str]) -> Example:
    """STS-B: how similar two sentences are, 0 to 5."""
    return Example(row["sentence1"], (row["sentence2"],), float(row["label"]))


def alternatives(row: Row, labels: Sequence[str]) -> Example:
    """COPA: which of two sentences is the cause or the result of a premise."""
    asked = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}[row["question"]]
    return Example(f"{row['premise']} {asked}", (row["choice1"], row["choice2"]), class_of(row, labels))


def same_sense(row: Row, labels: Sequence[str]) -> Example:
    """WiC as a pair of texts, the word in question before the first: `carry: You must carry ...`."""
    return Example(f"{row['word']}: {row['sentence1']}", (row["sentence2"],), class_of(row, labels))


def class_of(row: Mapping[str, Any], labels: Sequence[str]) -> int:
    """A label's number: published as that number, as true or false, or by name; ValueError for none of these."""
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool):
        return range(len(labels)).index(label)
    return labels.index(str(label).lower())
