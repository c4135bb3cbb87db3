"""Turns examples as they are published into the fields that lm-eval's definition of the task reads.

Each reader reads a file into rows (plain values, for JSON) and raises a DataError for a file of another form.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megahead.errors import DataError

Row = dict[str, Any]
Reader = Callable[[Path], list[Row]]


def json_lines(*fields: str) -> Reader:
    """A reader of one JSON object per line, which must have all `fields`; others are left out."""

    def read(file: Path) -> list[Row]:
        rows = [_object(line) for line in text_of(file).split("\n") if line]
        for number, row in enumerate(rows, 1):
            missing = [field for field in fields if field not in row]
            if missing:
                raise DataError(f"`{file}` must hold JSON objects with a `{missing[0]}`, but line {number} is not.")
        return [{field: row[field] for field in fields} for row in rows]

    return read


def passages(file: Path) -> list[Row]:
    """Texts of which the last word is predicted; DataError for one without a word, which lm-eval cannot score."""
    rows = json_lines("text")(file)
    for number, row in enumerate(rows, 1):
        if not str(row["text"]).strip():
            raise DataError(f"`{file}` must hold a text in each line, but line {number} has none; leave it out.")
    return rows


def each_of(file: Path, rows: Iterable[Any], changed: Callable[[Any], Row]) -> list[Row]:
    """Every row as the definition wants it; DataError with the number of one that is not as published."""
    made = []
    for number, row in enumerate(rows, 1):
        try:
            made.append(changed(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"lacks or does not know {error}" if isinstance(error, KeyError) else f"is of another form ({error})"
            raise DataError(f"`{file}` must hold examples as published, but example {number} {what}.") from None
    return made


def arc(file: Path) -> list[Row]:
    """The file has question and choices inside `question`; the definition wants parallel lists."""

    def changed(row: Row) -> Row:
        choices = {key: [choice[key] for choice in row["question"]["choices"]] for key in ("text", "label")}
        return {"question": row["question"]["stem"], "choices": choices, "answerKey": row["answerKey"]}

    return each_of(file, json_lines("question", "answerKey")(file), changed)


def boolq(file: Path) -> list[Row]:
    """The file has true and false, the task wants 1 and 0; otherwise every answer would silently count as wrong."""
    classes = {"false": 0, "true": 1, False: 0, True: 1}

    def changed(row: Row) -> Row:
        if row["label"] not in classes:
            raise ValueError(f"its label must be true or false, but is {row['label']!r}")
        return {**row, "label": classes[row["label"]]}

    return each_of(file, json_lines("passage", "question", "label")(file), changed)


def crows_pairs(file: Path) -> list[Row]:
    """A csv of sentence pairs."""
    table = csv.DictReader(text_of(file).splitlines(keepends=True))
    rows = [{key: row.get(key) for key in ("sent_more", "sent_less", "bias_type")} for row in table]
    if any(value is None for row in rows for value in row.values()):
        raise DataError(f"`{file}` must be a csv with sent_more, sent_less and bias_type, but lacks one.")
    return rows


def race(file: Path) -> list[Row]:
    """One article per line, its questions in parallel lists; the definition wants them as one Python literal."""

    def changed(row: Row) -> Row:
        problems = zip(row["questions"], row["options"], row["answers"], strict=True)
        named = [dict(zip(("question", "options", "answer"), problem, strict=True)) for problem in problems]
        return {"article": row["article"], "problems": repr(named)}

    return each_of(file, json_lines("article", "questions", "options", "answers")(file), changed)


def pubmedqa(file: Path) -> list[Row]:
    """A dict by article; test_ground_truth.json, beside it, lists the articles of the test set."""
    articles, tested = _mapping(file), _mapping(file.with_name("test_ground_truth.json"))
    fields = ("QUESTION", "CONTEXTS", "final_decision")
    try:
        return [{field: articles[key][field] for field in fields} for key in tested]
    except (KeyError, TypeError) as error:
        raise DataError(f"`{file}` must hold the articles that are tested, but lacks {error}.") from None


def qasper(file: Path) -> list[Row]:
    """A dict by paper, whose questions are a list of objects; the definition wants an object of lists."""

    def changed(paper: Row) -> Row:
        answers = [{"answer": [given["answer"] for given in asked["answers"]]} for asked in paper["qas"]]
        questions = {"question": [asked["question"] for asked in paper["qas"]], "answers": answers}
        return {"title": paper["title"], "abstract": paper["abstract"], "qas": questions}

    return each_of(file, _mapping(file).values(), changed)


def text_of(file: Path) -> str:
    """A whole file, without a byte order mark; DataError if it is missing or not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise DataError(f"`{file}` must be a readable text file, but is not; check the path.") from None


def _object(line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _mapping(file: Path) -> Mapping[str, Any]:
    value = _object(text_of(file))
    if not value:
        raise DataError(f"`{file}` must hold one JSON object of examples, but does not.")
    return value
