"""Tasks with local files: how each is scored, how its examples are read, and our own score functions."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from itertools import islice
from math import log, sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, TextIO

import orjson
import yaml

from megahead.data.indexed import dataset_paths
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, read_chunks
from megahead.errors import DataError, FieldError
from megahead.evaluate.results import Score
from megahead.wording import did_you_mean

if TYPE_CHECKING:
    from megahead.evaluate.language_models import LanguageModel


# Turns examples as they are published into the fields that lm-eval's definition of the task reads.

Row = dict[str, Any]
Converter = Callable[[Row], Row]
"""Converts a published example to the fields that the definition reads."""

Reader = Callable[[Path], list[Row]]
"""Reads a file into plain values, for JSON; DataError for a file of another form."""


def jsonl_reader(*fields: str, optional: Sequence[str] = (), convert: Converter = dict) -> Reader:
    """Returns a reader of one JSON object per line, which must have all `fields` and may have `optional` ones; others
    are dropped."""

    def read(file: Path) -> list[Row]:
        lines = enumerate(read_text(file).split("\n"), 1)
        rows = {number: _parse_object(line) for number, line in lines if line.strip()}
        for number, row in rows.items():
            missing = [field for field in fields if row.get(field) is None]
            if missing:
                raise DataError(f"`{file}` must hold JSON objects with a `{missing[0]}`, but line {number} is not.")
        selected = ({field: row[field] for field in (*fields, *optional) if field in row} for row in rows.values())
        return convert_rows(file, selected, convert)

    return read


def read_passages(file: Path) -> list[Row]:
    """Reads texts whose last word is predicted, without space behind it, which lm-eval would take for the word;
    DataError for one without a word, which it cannot score."""
    rows = [{"text": str(row["text"]).rstrip()} for row in jsonl_reader("text")(file)]
    for number, row in enumerate(rows, 1):
        if not row["text"]:
            raise DataError(f"`{file}` must hold a text in each object, but object {number} has none; leave it out.")
    return rows


def convert_rows(file: Path, rows: Iterable[Row], convert: Converter) -> list[Row]:
    """Converts every row to what the definition reads; DataError with the number of the first
    that is not as published."""
    converted = []
    for number, row in enumerate(rows, 1):
        try:
            converted.append(convert(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"lacks {error}" if isinstance(error, KeyError) else f"is of another form ({error})"
            raise DataError(f"`{file}` must hold examples as published, but example {number} {problem}.") from None
    return converted


def convert_arc(row: Row) -> Row:
    """The file has question and choices inside `question`; the definition wants parallel lists."""
    choices = {key: [choice[key] for choice in row["question"]["choices"]] for key in ("text", "label")}
    return {"question": row["question"]["stem"], "choices": choices, "answerKey": row["answerKey"]}


def convert_boolq(row: Row) -> Row:
    """The file has true and false, the task wants 1 and 0; otherwise every answer would silently count as wrong."""
    classes = {"false": 0, "true": 1, False: 0, True: 1}
    if row["label"] not in classes:
        raise ValueError(f"its label must be true or false, but is {row['label']!r}")
    return {**row, "label": classes[row["label"]]}


def convert_piqa(row: Row) -> Row:
    """Labels are published in a file of their own; as text they would silently count every answer as wrong."""
    if str(row["label"]) not in ("0", "1"):
        raise ValueError(f"its label must be 0 or 1, but is {row['label']!r}")
    return {**row, "label": int(row["label"])}


def read_crows_pairs(file: Path) -> list[Row]:
    """Reads a csv of sentence pairs."""
    table = csv.DictReader(StringIO(read_text(file), newline=""))
    rows = [{key: row.get(key) for key in ("sent_more", "sent_less", "bias_type")} for row in table]
    if any(value is None for row in rows for value in row.values()):
        raise DataError(f"`{file}` must be a csv with sent_more, sent_less and bias_type, but lacks one.")
    return rows


def convert_race(row: Row) -> Row:
    """One article per line, its questions in parallel lists; the definition wants them as one Python literal."""
    problems = zip(row["questions"], row["options"], row["answers"], strict=True)
    named = [dict(zip(("question", "options", "answer"), problem, strict=True)) for problem in problems]
    return {"article": row["article"], "problems": repr(named)}


def read_pubmedqa(folder: Path) -> list[Row]:
    """Reads a dict by article; a second file lists the articles of the test set."""
    file = folder / "ori_pqal.json"
    articles, tested = _read_object(file), _read_object(folder / "test_ground_truth.json")
    fields = ("QUESTION", "CONTEXTS", "final_decision")
    try:
        return [{field: articles[key][field] for field in fields} for key in tested]
    except (KeyError, TypeError) as error:
        raise DataError(f"`{file}` must hold the articles that are tested, but lacks {error}.") from None


def read_qasper(file: Path) -> list[Row]:
    """Reads a dict by paper, whose questions are a list of objects; the definition wants an object of lists."""

    def convert(paper: Row) -> Row:
        answers = [{"answer": [answer["answer"] for answer in question["answers"]]} for question in paper["qas"]]
        questions = {"question": [question["question"] for question in paper["qas"]], "answers": answers}
        return {"title": paper["title"], "abstract": paper["abstract"], "qas": questions}

    return convert_rows(file, _read_object(file).values(), convert)


def read_text(file: Path) -> str:
    """Reads a file, without a byte order mark; DataError if it is missing or not UTF-8."""
    with _open_text(file) as lines:
        return lines.read()


def read_first_line(file: Path) -> str:
    """Reads the first line that is not empty, as `read_text`; empty if there is none."""
    with _open_text(file) as lines:
        return next((line for line in lines if line.strip()), "")


@contextmanager
def _open_text(file: Path) -> Iterator[TextIO]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield lines
    except (OSError, UnicodeDecodeError):
        raise DataError(f"`{file}` must be readable UTF-8 text, but is not; check the path, or convert it.") from None


def _parse_object(line: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(line)  # rejects lone surrogates, which no tokenizer reads
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_object(file: Path) -> Mapping[str, Any]:
    value = _parse_object(read_text(file))
    if not value:
        raise DataError(f"`{file}` must hold one JSON object of examples, but does not.")
    return value


# Bits per byte of a decoder on any text, the measure of lm-eval's WikiText task, comparable across tokenizers.


def read_documents(file: Path, limit: int | None) -> list[str]:
    """Reads the first `limit` documents of a file in any format that `megahead preprocess` reads."""
    texts = (text for chunk in read_chunks(find_inputs([file]), Selection()) for text in chunk.parse().require_texts())
    return list(islice(texts, limit))


def bits_per_byte(model: LanguageModel, texts: Sequence[str]) -> list[Score]:
    """Scores all documents together, each from its start; the standard error is that of a ratio of two sums."""
    bits = [-nats / log(2) for nats in model.log_probabilities(texts)]
    sizes = [len(text.encode()) for text in texts]
    count, value = len(texts), sum(bits) / sum(sizes)
    if count < 2:
        return [Score("bits_per_byte", value, None)]
    squares = sum((text_bits - value * size) ** 2 for text_bits, size in zip(bits, sizes, strict=True))
    return [Score("bits_per_byte", value, sqrt(squares * count / (count - 1)) / sum(sizes))]


# Minimal pairs, a correct and an incorrect sentence: how often a model gives the correct one the higher probability.
#
# BLiMP (Warstadt et al. 2020, arXiv 1912.00582) has 67 paradigms of grammar with 1,000 pairs each, one per file.
# Sentences are scored whole, after a space, as in lm-eval.

_read_pairs = jsonl_reader(
    "sentence_good",
    "sentence_bad",
    "field",
    "UID",
    convert=lambda row: {**row, "field": row["field"].replace("/", "_")},
)


def read_blimp(folder: Path, limit: int | None) -> list[Row]:
    """Reads the pairs in `folder`, the first `limit` of each paradigm; two spellings of a field are merged."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"`{folder}` must hold BLiMP's .jsonl files, but holds none.")
    return [row for file in files for row in _read_pairs(file)[:limit]]


def accuracy_by(key: str) -> Callable[[LanguageModel, Sequence[Row]], list[Score]]:
    """Returns a score function: the accuracy over all paradigms, then over those with the same value of `key`."""

    def score(model: LanguageModel, pairs: Sequence[Row]) -> list[Score]:
        sentences = [f" {pair[side]}" for pair in pairs for side in ("sentence_good", "sentence_bad")]
        log_p = model.log_probabilities(sentences)
        scores_by_paradigm: dict[str, list[float]] = {}
        groups: dict[str, dict[str, list[float]]] = {}
        for pair, good, bad in zip(pairs, log_p[::2], log_p[1::2], strict=True):
            paradigm_scores = scores_by_paradigm.setdefault(pair["UID"], [])
            paradigm_scores.append(0.5 if good == bad else float(good > bad))
            groups.setdefault(pair[key], {})[pair["UID"]] = paradigm_scores
        return [
            _mean_score("acc", scores_by_paradigm),
            *(_mean_score(f"acc_{name}", groups[name]) for name in sorted(groups)),
        ]

    return score


def _mean_score(metric: str, paradigms: Mapping[str, Sequence[float]]) -> Score:
    """Returns the mean of the paradigms' means; its standard error is over the choice of pairs (None for one pair)."""
    value = fmean(map(fmean, paradigms.values()))
    if any(len(scores) < 2 for scores in paradigms.values()):
        return Score(metric, value, None)
    spread = sum(variance(scores) / len(scores) for scores in paradigms.values())
    return Score(metric, value, sqrt(spread) / len(paradigms))


# Texts that are compared by vectors: articles, searched by title or first sentence, and pairs with a similarity.

_SENTENCE_END = re.compile(r"(?<=[.!?؟۔।])\s+|(?<=[。！？])|\n")
"""Matches what separates two sentences in most scripts: space after a final mark, or a line break."""

_WORD_GOES_ON = re.compile(r"[^\W\u0e00-\u109f\u1780-\u17ff\u2e80-\ud7ff]")
"""Matches a letter or digit of scripts with spaces between words: all but Thai to Burmese, Khmer, Chinese, Japanese,
and Korean, whose particles follow a name without a space."""


def _continues_word(text: str) -> bool:
    return bool(_WORD_GOES_ON.match(text)) or unicodedata.category(text[:1] or " ").startswith("M")  # a vowel sign


def read_articles(file: Path, limit: int | None) -> list[Row]:
    """Reads JSON lines of {"title", "text"} as {"title", "sentence", "rest"}: an article's first sentence and all after
    it. A title that begins the text, and ends with a word there, is left out of both. Skips articles without a title or
    a second sentence."""
    articles = []
    for row in jsonl_reader("title", "text")(file):
        title, text = str(row["title"]).strip(), str(row["text"]).strip()
        untitled = text.removeprefix(title)
        text = text if _continues_word(untitled) else untitled.strip()
        sentence, *rest = _SENTENCE_END.split(text, maxsplit=1)
        if title and sentence and rest and rest[0].strip():
            articles.append({"title": title, "sentence": sentence, "rest": rest[0].strip()})
    return articles[:limit]


def read_similarities(file: Path, limit: int | None) -> list[Row]:
    """Reads STS-B's tab-separated lines as {"sentence1", "sentence2", "score"}."""
    table = csv.DictReader(StringIO(read_text(file), newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)

    def convert(row: Row) -> Row:
        return {"sentence1": row["sentence1"], "sentence2": row["sentence2"], "score": float(row["score"])}

    return convert_rows(file, list(table)[:limit], convert)


# Tasks with local files: how each is scored (by a definition that lm-eval ships, or a function here), and its data.
#
# A new task is a line in `TASKS`: its shipped YAML (or its score function), its file, and a reader of that file.


_DECODERS, _ENCODERS = ("a decoder",), ("an encoder",)


@dataclass(frozen=True)
class LMEvalTask:
    """A task that lm-eval ships, with a local file for its data."""

    definition: str
    """The shipped YAML whose prompt and metrics are used, below lm_eval/tasks."""

    file: str | None
    """Where the examples are in a data folder, as published; None if the user must name a file."""

    read: Reader

    models: tuple[str, ...] = _DECODERS
    """Kinds of models that can be scored on it."""


@dataclass(frozen=True)
class OwnTask:
    """A task that this package scores."""

    file: str | None
    """As in `LMEvalTask`; may be a folder."""

    read: Callable[[Path, int | None], Sequence[Any]]
    """Reads the examples, up to a limit."""

    score: Callable[..., Any]
    """Scores by log-probabilities of whole texts (an encoder's are pseudo-log-likelihoods): takes a LanguageModel and
    the examples, and returns scores."""

    models: tuple[str, ...]
    """Kinds of models that can be scored on it."""

    scores_folder: bool = False
    """Whether `score` takes a model's folder, the file, a limit and a batch size, and returns a TaskResult."""


def _lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Returns a function of another module of this package that is imported at the first call, as it imports torch or
    this module."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"megahead.evaluate.{module}"), name)(*arguments)

    return call


_read_arc = jsonl_reader("question", "answerKey", convert=convert_arc)
_read_race = jsonl_reader("article", "questions", "options", "answers", convert=convert_race)
_read_boolq = jsonl_reader("passage", "question", "label", convert=convert_boolq)
_read_piqa = jsonl_reader("goal", "sol1", "sol2", "label", convert=convert_piqa)
_read_openbookqa = jsonl_reader("question_stem", "choices", "answerKey")
_read_sequences = _lazy_function("next_item", "read_sequences")
_read_searches = _lazy_function("search_data", "read_searches")
_read_sciq = jsonl_reader("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")

TASKS: Mapping[str, LMEvalTask | OwnTask] = {
    "cloze": LMEvalTask("lambada/lambada_openai.yaml", None, read_passages),
    "lambada_openai": LMEvalTask("lambada/lambada_openai.yaml", "lambada/lambada_test.jsonl", read_passages),
    "arc_easy": LMEvalTask("arc/arc_easy.yaml", "eval/ARC/ARC-e/ARC-Easy-Test.jsonl", _read_arc),
    "arc_challenge": LMEvalTask("arc/arc_challenge.yaml", "eval/ARC/ARC-c/ARC-Challenge-Test.jsonl", _read_arc),
    "boolq": LMEvalTask("super_glue/boolq/default.yaml", "superglue/BoolQ/val.jsonl", _read_boolq),
    "crows_pairs_english": LMEvalTask(
        "crows_pairs/crows_pairs_english.yaml", "eval/crows_pairs/crows_pairs_anonymized.csv", read_crows_pairs
    ),
    "race": LMEvalTask("race/race.yaml", "eval/race/test-high.jsonl", _read_race),
    "sciq": LMEvalTask("sciq/sciq.yaml", "eval/sciq/validation.jsonl", _read_sciq),
    "pubmedqa": LMEvalTask("pubmedqa/pubmedqa.yaml", "eval/pubmedqa", read_pubmedqa),
    "qasper_bool": LMEvalTask("qasper/bool.yaml", "eval/qasper/qasper-test-v0.3.json", read_qasper),
    "piqa": LMEvalTask("piqa/piqa.yaml", "eval/piqa/validation.jsonl", _read_piqa),
    "openbookqa": LMEvalTask("openbookqa/openbookqa.yaml", "eval/openbookqa/validation.jsonl", _read_openbookqa),
    "blimp": OwnTask("eval/blimp", read_blimp, accuracy_by("field"), _DECODERS + _ENCODERS),
    "blimp_paradigms": OwnTask("eval/blimp", read_blimp, accuracy_by("UID"), _DECODERS + _ENCODERS),
    "bits_per_byte": OwnTask(None, read_documents, bits_per_byte, _DECODERS),
    "next_item": OwnTask(
        None, _read_sequences, _lazy_function("next_item", "next_item"), _DECODERS, scores_folder=True
    ),
    "retrieval": OwnTask(None, _read_searches, _lazy_function("retrieval", "retrieval"), _ENCODERS, scores_folder=True),
    "stsb": OwnTask(
        "glue/STS-B/dev.tsv", read_similarities, _lazy_function("retrieval", "stsb"), _ENCODERS, scores_folder=True
    ),
}
"""By name. `cloze`: any jsonl of {"text"}, of which the last word is predicted, scored exactly as lambada_openai.

`bits_per_byte`: any text that `megahead preprocess` reads. `next_item`: a dataset that `megahead preprocess --table`
makes. `retrieval`: a jsonl of {"title", "text"}, whose articles are searched; a jsonl of {"query", "positive"}, or
BEIR's folder.

`blimp`: accuracy over all of BLiMP's paradigms, and over those of each field of grammar (`field`); `blimp_paradigms`:
over all, and in each paradigm (`UID`).

`qasper_bool`: lm-eval's definition takes yes as the right answer of every question; do not trust its f1.
"""


def task_files(
    names: Sequence[str],
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    items: Path | None = None,
    articles: Path | None = None,
) -> dict[str, Path]:
    """Returns the file of each task: in the folder `data`, or `cloze`, `text`, `articles`, or the index of the dataset
    `items`. Each is read once, to validate it.

    Raises FieldError (its field is an option of `megahead eval-harness`) or DataError.
    """
    files = {}
    index = None if items is None else dataset_paths(items)[1]
    options = {"cloze": ("--cloze", cloze), "bits_per_byte": ("--text", text), "next_item": ("--items", index)}
    options["retrieval"] = "--articles", articles
    for name in names:
        if name not in TASKS:
            raise FieldError("--tasks", f"name tasks of {', '.join(TASKS)}", got=name, hint=did_you_mean(name, TASKS))
        files[name] = _task_file(name, data, options)
        task_rows(name, files[name])
    return files


def require_model_kind(names: Iterable[str], *, encoder: bool) -> None:
    """Raises FieldError for a task that only the other kind of model, a decoder or an encoder, can be scored on."""
    kind = "an encoder" if encoder else "a decoder"
    suitable = [name for name, task in TASKS.items() if kind in task.models]
    for name in names:
        if name not in suitable:
            hint = "" if name in TASKS else did_you_mean(name, suitable)
            raise FieldError("--tasks", f"name tasks of {', '.join(suitable)} for {kind}", got=name, hint=hint)


def task_rows(name: str, file: Path, limit: int | None = None) -> Sequence[Any]:
    """Returns the (first `limit`) examples of a task, as its definition or score function reads them; DataError for a
    file that is not the task's."""
    task = TASKS[name]
    rows = task.read(file)[:limit] if isinstance(task, LMEvalTask) else task.read(file, limit)
    if not rows:
        raise DataError(f"`{file}` must hold examples, but is empty.")
    return rows


def write_tasks(files: Mapping[str, Path], folder: Path) -> Path:
    """Writes definitions and rows of those tasks that lm-eval scores; returns the folder for its `--include_path`.

    The definitions name their data and lm-eval's shipped ones by absolute path, and share a cache in `folder`.
    """
    import lm_eval

    folder, shipped = folder.resolve(), Path(lm_eval.__file__).parent / "tasks"
    definitions = folder / "tasks"
    definitions.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        task = TASKS[name]
        if not isinstance(task, LMEvalTask):
            continue
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in task_rows(name, file)), encoding="utf-8")
        content = {
            "include": str(shipped / task.definition),
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


def _task_file(name: str, data: Path | None, options: Mapping[str, tuple[str, Path | None]]) -> Path:
    path = TASKS[name].file
    if path is None:
        option, file = options[name]
        if file is None:
            raise FieldError(option, f"name the file of task {name}", got="missing")
        return file
    if data is None:
        raise FieldError("--data", f"name the folder that holds {path} (task {name})", got="missing")
    if not (data / path).exists():
        raise DataError(f"`{data}` must hold {path} for task {name}, but lacks it; get it or leave the task out.")
    return data / path
