"""Vocabularies of 32 k to 420 k ids on the same text in many languages: held-out bits per byte of each, headless.

Records of --text name their language (`lang`). For each size a multilingual tokenizer is made of the training text, and
a small decoder learns in it. All runs take equally many steps, which take equally long; a larger vocabulary has read
more text by then, so each is also scored at the step at which it had read what the smallest has read at the end.

For the smaller sizes vanilla runs beside it, for as many steps as fit in the time of the headless run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, speed
from megahead.config.objective import HeadName
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import preprocess
from megahead.data.sources import Selection, find_inputs, read_chunks
from megahead.data.tokenizer import load_tokenizer
from megahead.evaluate.perplexity import evaluate_on_each
from megahead.files import write_atomically
from megahead.report.read import RunMetrics

LANGUAGES = (
    *("ar", "bg", "bn", "de", "el", "es", "fi", "fr", "hi", "id"),
    *("ko", "ru", "sw", "te", "th", "tr", "ur", "vi", "zh"),
)
SIZES = (32_768, 120_000, 262_144, 420_000)
STEPS = 900
VANILLA_SIZES, SHORT_STEPS = (32_768, 120_000), 20
# Of each language, in every tenth document; scoring them takes as long as the vocabulary is large
HELD_OUT_BYTES = 10_000
# A constant learning rate, so that going on costs nothing; rare rows want a larger one than the body
SETTINGS = (
    "data.sequence_length=128",
    "batch.micro_size=16",
    "schedule.name=constant",
    "optimizer.table.learning_rate_ratio=8",
    "training.evaluate_samples=512",
)


@dataclass(frozen=True)
class Text:
    """The text in one vocabulary: settings that name it, and its held-out part by language."""

    settings: list[str]
    tokenizer: Path
    train: IndexedDataset
    held_out: dict[str, Path]


def compare_large_vocabularies(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains each size (or those of `only`: numbers)."""
    source = _split(laboratory)
    sizes = [size for size in SIZES if not only or str(size) in only]
    texts = {size: _text(laboratory, source, size) for size in sizes}
    first = _text(laboratory, source, SIZES[0]).train.num_tokens
    scored = [row for size in sizes for row in _scored(laboratory, size, texts[size], first)]
    chart = Chart("Bits per byte", "vocabulary", lines(scored, "at equal", "vocabulary", "bits per byte"), True)
    laboratory.record("large_vocabularies", [_but_languages(row) for row in scored], chart)
    by_language = [_by_language(language, scored, texts) for language in _known(texts)]
    laboratory.record("large_vocabularies-languages", by_language)
    vanilla = [
        row for size in VANILLA_SIZES if size in texts for row in _against_vanilla(laboratory, size, texts[size])
    ]
    laboratory.record("large_vocabularies-vanilla", vanilla)


def _split(laboratory: Laboratory) -> Path:
    """A folder with `train.jsonl` and the held-out documents of each language, `LANGUAGE.jsonl`; made once."""
    folder = laboratory.folder.parent / "languages"
    if not (folder / "train.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train = bytearray()
        for language in LANGUAGES:
            held_out = bytearray()
            for number, text in enumerate(_documents(laboratory.given_text(), language), start=1):
                line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
                if number % 10 == 0 and len(held_out) < HELD_OUT_BYTES:
                    held_out += line
                else:
                    train += line
            if held_out:
                write_atomically(folder / f"{language}.jsonl", bytes(held_out))
        write_atomically(folder / "train.jsonl", bytes(train))
    return folder


def _documents(text: Path, language: str) -> Iterator[str]:
    selection = Selection(keep=(("lang", language),))
    for chunk in read_chunks(find_inputs([text]), selection):
        yield from chunk.parse().strict()


def _text(laboratory: Laboratory, source: Path, size: int) -> Text:
    """The text in so many ids; made where it is missing."""
    folder = laboratory.folder.parent / f"multilingual-{size}"
    tokenizer, train = folder / "tokenizer.json", source / "train.jsonl"
    made = ["--type", "multilingual", "--vocab-size", str(size), "--output", str(tokenizer)]
    laboratory.make(tokenizer, "train_tokenizer.py", "--input", str(train), *made)
    for file in sorted(source.glob("*.jsonl")):
        if not (folder / f"{file.stem}.idx").exists():
            preprocess([file], tokenizer, folder / file.stem)
    held_out = {file.stem: folder / file.stem for file in sorted(source.glob("??.jsonl"))}
    settings = [f"data.train={folder / 'train'}", f"data.tokenizer={tokenizer}", f"model.vocab_size={size}"]
    settings.append(f"data.validation={next(iter(held_out.values()))}")  # one language: this takes time
    return Text(settings, tokenizer, IndexedDataset(folder / "train"), held_out)


def _scored(laboratory: Laboratory, size: int, text: Text, first: int) -> Iterator[Row]:
    """A row where the run has read what the first has read at the end, and one for its own end; `first`: tokens of the
    whole text in the first vocabulary."""
    step = min(STEPS, round(STEPS * text.train.num_tokens / first))
    name = f"headless-{size}"
    run = laboratory.train("small-headless", name, *text.settings, *SETTINGS, *_course(STEPS, step))
    for at, equal in ((step, "text"), (STEPS, "time")):
        bits = _bits_per_byte(laboratory, name, at, "pmi", text)
        yield {
            "at equal": equal,
            "vocabulary": size,
            "steps": at,
            "MB of text": _megabytes(at, run, text),
            "bits per byte": mean(bits.values()),
            "ms a step": _milliseconds(run),
            **bits,
        }


def _against_vanilla(laboratory: Laboratory, size: int, text: Text) -> list[Row]:
    """Vanilla for as long as the headless run of STEPS took, headless for as many steps, and headless for as long."""
    took = {objective: _speed_of(laboratory, objective, size, text) for objective in ("headless", "vanilla")}
    times = took["vanilla"] / took["headless"]
    steps = max(1, round(STEPS / times))
    vanilla, equal_text = f"vanilla-{size}", f"equal-text-{size}"
    _trained(laboratory, "vanilla", vanilla, text, steps)
    _trained(laboratory, "headless", equal_text, text, steps)
    compared = (
        ("vanilla", steps, vanilla),
        ("headless", steps, equal_text),
        ("headless", STEPS, f"headless-{size}"),
    )
    rows: list[Row] = []
    for objective, number, name in compared:
        head: HeadName = "pmi" if objective == "headless" else "trained"
        bits = mean(_bits_per_byte(laboratory, name, number, head, text).values())
        row = {"vocabulary": size, "objective": objective, "steps": number, "bits per byte": bits}
        rows.append(row | {"ms a step": took[objective], "minutes": number * took[objective] / 60_000})
    return [row | {"times headless": row["ms a step"] / took["headless"]} for row in rows]


def _speed_of(laboratory: Laboratory, objective: str, size: int, text: Text) -> int:
    """ms a step, in a short run of its own."""
    name = f"pair-{objective}-{size}"
    return _milliseconds(_trained(laboratory, objective, name, text, SHORT_STEPS, "schedule.warmup_steps=1"))


def _trained(laboratory: Laboratory, objective: str, name: str, text: Text, steps: int, *more: str) -> RunMetrics:
    given = [*text.settings, *SETTINGS, f"objective.name={objective}", *_course(steps, steps), *more]
    return laboratory.train("small-headless", name, *given)


def _course(steps: int, checkpoint: int) -> list[str]:
    settings = {"steps": steps, "checkpoint_every": checkpoint, "evaluate_every": steps, "keep_checkpoints": 2}
    return [f"training.{name}={value}" for name, value in settings.items()]


def _bits_per_byte(laboratory: Laboratory, name: str, step: int, head: HeadName, text: Text) -> dict[str, float]:
    """By language; computed once."""
    path = laboratory.folder / name / f"held-out-{step}.json"
    if not path.exists():
        checkpoint = laboratory.folder / name / f"checkpoints/step-{step:08d}"
        results = evaluate_on_each(checkpoint, head, list(text.held_out.values()))
        found = {language: one.bits_per_byte for language, one in zip(text.held_out, results, strict=True)}
        write_atomically(path, json.dumps(found).encode())
    bits: dict[str, float] = json.loads(path.read_text())
    return bits


def _megabytes(step: int, run: RunMetrics, text: Text) -> float:
    """Text read until a step."""
    last, info = run.training[-1], text.train.info
    assert info is not None
    return float(last["tokens"] / last["step"] * step * info.text_bytes / info.tokens / 1e6)


def _milliseconds(run: RunMetrics) -> int:
    last = run.training[-1]
    return round(1e3 * float(last["tokens"]) / float(last["step"]) / speed(run))


def _known(texts: dict[int, Text]) -> list[str]:
    return list(next(iter(texts.values())).held_out)


def _but_languages(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in LANGUAGES}


def _by_language(language: str, scored: Sequence[Row], texts: dict[int, Text]) -> Row:
    """Bits per byte at equal text and at equal time, and how words are cut."""
    row: Row = {"language": language}
    row |= {f"{one['vocabulary']:,}, equal {one['at equal']}": one[language] for one in scored}
    for size, text in texts.items():
        tokens, split = _words(text, language)
        row |= {f"{size:,}: tokens a word": tokens, f"{size:,}: words split": split}
    return row


def _words(text: Text, language: str) -> tuple[float, float]:
    """Of held-out text: tokens a word, and the share of words of more than one; words are what spaces separate."""
    dataset, tokenizer = IndexedDataset(text.held_out[language]), load_tokenizer(text.tokenizer)
    documents = [tokenizer.decode(dataset[index][:-1]) for index in range(len(dataset))]
    words = [f" {word}" for document in documents for word in document.split()]
    lengths = tokenizer.encode_flat(words)[1]
    return float(lengths.mean()), float((lengths > 1).mean())
