"""Vocabularies of 32 k to 420 k ids on the same text in many languages, and a decoder that changes its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from experiments.measures import Chart, Row, lines, speed
from experiments.runner import ExperimentRunner, course, run_name, settings_of
from megahead.config.objective import HeadName
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import preprocess
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, read_chunks
from megahead.data.tokenizer import load_tokenizer
from megahead.evaluate.perplexity import evaluate_on_datasets
from megahead.files import write_atomically
from megahead.report.read import RunMetrics

LANGUAGES = (
    *("ar", "bg", "bn", "de", "el", "es", "fi", "fr", "hi", "id"),
    *("ko", "ru", "sw", "te", "th", "tr", "ur", "vi", "zh"),
)
SIZES = (32_768, 120_000, 262_144, 420_000)
STEPS = 900
VANILLA_SIZES, SHORT_STEPS = (32_768, 120_000), 20
HELD_OUT_BYTES = 10_000  # of each language, in every tenth document; scoring takes as long as the vocabulary is large
SETTINGS = (  # a constant learning rate, so that going on costs nothing; rare rows want a larger one than the body
    *("data.sequence_length=128", "batch.micro_size=16", "schedule.name=constant"),
    *("optimizer.table.learning_rate_ratio=8", "training.evaluate_samples=512"),
)

LARGER = 32_768
FIRST_STEPS, STEPS_AFTER, EVERY = 320, 160, 10
HELD_OUT = 500  # one document in so many: reading all of it costs little beside training


@dataclass(frozen=True)
class Text:
    """The text in one vocabulary: settings that name it, and its held-out part by language."""

    settings: list[str]
    tokenizer: Path
    train: IndexedDataset
    held_out: dict[str, Path]


def compare_large_vocabularies(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Held-out bits per byte of each size (or those of `only`: numbers), headless; records of --text name their
    language (`lang`).

    For each size a multilingual tokenizer is made of the training text, and a small decoder learns in it. All runs take
    equally many steps, which take equally long; a larger vocabulary has read more text by then, so each is also scored
    at the step at which it had read what the smallest has read at the end. For the smaller sizes vanilla runs beside
    it, for as many steps as fit in the time of the headless run.
    """
    source = _split(runner)
    sizes = [size for size in SIZES if not only or str(size) in only]
    texts = {size: _text(runner, source, size) for size in sizes}
    first = _text(runner, source, SIZES[0]).train.num_tokens
    scored = [row for size in sizes for row in _scored(runner, size, texts[size], first)]
    chart = Chart("Bits per byte", "vocabulary", lines(scored, "at equal", "vocabulary", "bits per byte"), True)
    without = [{name: value for name, value in row.items() if name not in LANGUAGES} for row in scored]
    runner.record("large_vocabularies", without, chart)
    known = next(iter(texts.values())).held_out
    runner.record("large_vocabularies-languages", [_by_language(one, scored, texts) for one in known])
    vanilla = [row for size in VANILLA_SIZES if size in texts for row in _against_vanilla(runner, size, texts[size])]
    runner.record("large_vocabularies-vanilla", vanilla)


def _split(runner: ExperimentRunner) -> Path:
    """A folder with `train.jsonl` and the held-out documents of each language, `LANGUAGE.jsonl`; made once."""
    folder = runner.folder.parent / "languages"
    if (folder / "train.jsonl").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    train = bytearray()
    for language in LANGUAGES:
        held_out = bytearray()
        chunks = read_chunks(find_inputs([runner.given_text()]), Selection(keep=(("lang", language),)))
        for number, text in enumerate((one for chunk in chunks for one in chunk.parse().strict_texts()), start=1):
            part = held_out if number % 10 == 0 and len(held_out) < HELD_OUT_BYTES else train
            part += json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        if held_out:
            write_atomically(folder / f"{language}.jsonl", bytes(held_out))
    write_atomically(folder / "train.jsonl", bytes(train))
    return folder


def _text(runner: ExperimentRunner, source: Path, size: int) -> Text:
    """The text in so many ids; made where it is missing."""
    folder = runner.folder.parent / f"multilingual-{size}"
    tokenizer, train = folder / "tokenizer.json", source / "train.jsonl"
    kind = ["--type", "multilingual", "--vocab-size", size]
    runner.make(tokenizer, "train_tokenizer.py", "--input", train, *kind)
    for file in sorted(source.glob("*.jsonl")):
        if not (folder / f"{file.stem}.idx").exists():
            preprocess([file], tokenizer, folder / file.stem)
    held_out = {file.stem: folder / file.stem for file in sorted(source.glob("??.jsonl"))}
    settings = [f"data.train={folder / 'train'}", f"data.tokenizer={tokenizer}", f"model.vocab_size={size}"]
    settings.append(f"data.validation={next(iter(held_out.values()))}")  # one language: this takes time
    return Text(settings, tokenizer, IndexedDataset(folder / "train"), held_out)


def _scored(runner: ExperimentRunner, size: int, text: Text, first: int) -> Iterator[Row]:
    """A row where the run has read what the first has read at the end, and one for its own end; `first`: tokens of the
    whole text in the first vocabulary."""
    step = min(STEPS, round(STEPS * text.train.num_tokens / first))
    name, info = f"headless-{size}", text.train.info
    assert info is not None
    run = runner.train(
        "small-headless", name, *text.settings, *SETTINGS, *course(STEPS, checkpoint_every=step, keep_checkpoints=2)
    )
    last = run.training[-1]
    for at, equal in ((step, "text"), (STEPS, "time")):
        bits = _bits_per_byte(runner, name, at, "pmi", text)
        megabytes = float(last["tokens"] / last["step"] * at * info.text_bytes / info.tokens / 1e6)
        row: Row = {"at equal": equal, "vocabulary": size, "steps": at, "MB of text": megabytes}
        yield row | {"bits per byte": mean(bits.values()), "ms a step": _milliseconds(run), **bits}


def _against_vanilla(runner: ExperimentRunner, size: int, text: Text) -> list[Row]:
    """Vanilla for as long as the headless run of STEPS took, headless for as many steps, and headless for as long."""

    def train(objective: str, name: str, steps: int, *more: str) -> RunMetrics:
        given = [*text.settings, *SETTINGS, f"objective.name={objective}", *course(steps), *more]
        return runner.train("small-headless", name, *given)

    took = {
        objective: _milliseconds(train(objective, f"pair-{objective}-{size}", SHORT_STEPS, "schedule.warmup_steps=1"))
        for objective in ("headless", "vanilla")
    }
    steps = max(1, round(STEPS / (took["vanilla"] / took["headless"])))
    train("vanilla", f"vanilla-{size}", steps)
    train("headless", f"equal-text-{size}", steps)
    compared: tuple[tuple[str, int, str, HeadName], ...] = (
        ("vanilla", steps, f"vanilla-{size}", "trained"),
        ("headless", steps, f"equal-text-{size}", "pmi"),
        ("headless", STEPS, f"headless-{size}", "pmi"),
    )
    rows: list[Row] = []
    for objective, number, name, head in compared:
        bits = mean(_bits_per_byte(runner, name, number, head, text).values())
        row = {"vocabulary": size, "objective": objective, "steps": number, "bits per byte": bits}
        row |= {"ms a step": took[objective], "minutes": number * took[objective] / 60_000}
        rows.append(row | {"times headless": took[objective] / took["headless"]})
    return rows


def _bits_per_byte(runner: ExperimentRunner, name: str, step: int, head: HeadName, text: Text) -> dict[str, float]:
    """By language; computed once."""
    path = runner.folder / name / f"held-out-{step}.json"
    if not path.exists():
        checkpoint = runner.folder / name / f"checkpoints/step-{step:08d}"
        results = evaluate_on_datasets(checkpoint, head, list(text.held_out.values()))
        found = {language: one.bits_per_byte for language, one in zip(text.held_out, results, strict=True)}
        write_atomically(path, json.dumps(found).encode())
    bits: dict[str, float] = json.loads(path.read_text())
    return bits


def _milliseconds(run: RunMetrics) -> int:
    last = run.training[-1]
    return round(1e3 * float(last["tokens"]) / float(last["step"]) / speed(run))


def _by_language(language: str, scored: Sequence[Row], texts: dict[int, Text]) -> Row:
    """Bits per byte at equal text and at equal time, and how words are cut: tokens a word of held-out text, and the
    share of words of more than one; words are what spaces separate."""
    row: Row = {"language": language}
    row |= {f"{one['vocabulary']:,}, equal {one['at equal']}": one[language] for one in scored}
    for size, text in texts.items():
        dataset, tokenizer = IndexedDataset(text.held_out[language]), load_tokenizer(text.tokenizer)
        documents = [tokenizer.decode(dataset[index][:-1]) for index in range(len(dataset))]
        lengths = tokenizer.encode_flat([f" {word}" for document in documents for word in document.split()])[1]
        row |= {f"{size:,}: tokens a word": float(lengths.mean())}
        row |= {f"{size:,}: words split": float((lengths > 1).mean())}
    return row


def compare_revocabulary(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Tokens and minutes until a decoder's bits per byte are back, by each way (or those of `only`) in each new one.

    A headless decoder learns --text in 8,192 ids. Then it gets those of a larger vocabulary of the same text, and those
    of --tokenizer where one is given (a multilingual one, say); the rows of new tokens begin as the means of their
    pieces. All of the held-out text is read each time, so that bits per byte are of the same bytes in every vocabulary.
    """
    runs = replace(runner, folder=runner.folder / "runs", held_out=HELD_OUT)
    base = runs.train("small-headless", "base", *runs.data(), *course(FIRST_STEPS, evaluate_samples=1_000_000))
    goal = base.validation[-1]["bits_per_byte"]
    texts = {f"{LARGER:,} ids": runs.data(LARGER)}
    if runs.tokenizer is not None:
        texts[runs.tokenizer.stem] = runs.data_in(runs.tokenizer)
    rows: list[Row] = []
    charts: list[Chart] = []
    for name, text in texts.items():
        given = [*text, *_moved(runs, name, text)]
        given += course(STEPS_AFTER, evaluate_every=EVERY, evaluate_samples=1_000_000)
        cells = runs.grid("revocabulary", only, *given, vocabulary=[name])
        rows += [{**cell.values, **_back(cell.run, goal), "tokens/s": speed(cell.run)} for cell in cells]
        along = [{**record, **cell.values} for cell in cells for record in cell.run.validation]
        before = {"before": [(record["tokens"], goal) for record in along]}
        charts.append(Chart(name, "tokens", lines(along, "way", "tokens", "bits_per_byte") | before))
    runner.record("revocabulary", rows, *charts)


def _moved(runner: ExperimentRunner, name: str, text: Sequence[str]) -> list[str]:
    """Settings that begin with the base in the vocabulary of `text`; converted where that was not done."""
    tokenizer = next(one.partition("=")[2] for one in text if one.startswith("data.tokenizer="))
    moved = runner.folder / run_name(f"moved-{name}")
    base = runner.folder / "base"
    runner.make(moved, "convert.py", "revocabulary", "--model", base, "--tokenizer", tokenizer)
    ids = load_tokenizer(Path(tokenizer)).vocab_size
    return settings_of({"model.vocab_size": ids, "init.from_checkpoint": moved})


def _back(run: RunMetrics, goal: float) -> Row:
    """When an evaluation is first as good as `goal`, in tokens and in minutes at the run's median speed; the first
    evaluation, and the last."""
    first = next(record for record in run.validation if record["step"])
    reached = next((record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal), None)
    return {
        "tokens until back": reached,
        "minutes until back": None if reached is None else reached / speed(run) / 60,
        f"bits per byte after {first['step']} steps": first["bits_per_byte"],
        "at the end": run.validation[-1]["bits_per_byte"],
    }
