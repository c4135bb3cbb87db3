"""Vocabularies of 32 k to 420 k ids on the same text in many languages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.measures import Chart, Row, tokens_per_second
from experiments.runner import ExperimentRunner, select_names, training_overrides
from megahead.config.objective import HeadName
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import preprocess
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, read_chunks
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
HELD_OUT_BYTES = 10_000  # of each language, every tenth document; scoring time grows with the vocabulary
SETTINGS = (  # constant learning rate, so that runs compare at any step; rare rows need a larger one than the backbone
    *("data.sequence_length=128", "batch.micro_size=16", "schedule.name=constant"),
    *("optimizer.table.learning_rate_ratio=8", "training.evaluate_samples=512"),
)


@dataclass(frozen=True)
class Text:
    """The text in one vocabulary: overrides, and the held-out datasets by language."""

    settings: list[str]
    train: IndexedDataset
    held_out: dict[str, Path]


def compare_large_vocabularies(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Headless held-out bits per byte of each vocabulary size (or those of `only`: numbers); records of --text name
    their language (`lang`).

    For each size a multilingual tokenizer is trained on the training text, and a small decoder on its ids. All runs
    have the same number of steps, which take equally long; with a larger vocabulary they read more text, so each is
    also scored at the step with as much text as the smallest vocabulary's run reads. For the smaller sizes vanilla runs
    train for as many steps as fit in the time of the headless run.
    """
    (sizes,) = select_names(only, SIZES)
    source = _split_languages(runner)
    texts = {size: _prepare_text(runner, source, size) for size in sizes}
    smallest_vocabulary_tokens = _prepare_text(runner, source, SIZES[0]).train.num_tokens
    scored_rows = [
        row for size in sizes for row in _score_at_equal(runner, size, texts[size], smallest_vocabulary_tokens)
    ]
    chart = Chart.of(scored_rows, "Bits per byte", "at equal", "vocabulary", "bits per byte", log_x=True)
    runner.record("large_vocabularies", scored_rows, chart)
    both = [size for size in VANILLA_SIZES if size in texts]
    vanilla_rows = [row for size in both for row in _compare_with_vanilla(runner, size, texts[size])]
    runner.record("large_vocabularies-vanilla", vanilla_rows)


def _split_languages(runner: ExperimentRunner) -> Path:
    """A folder with `train.jsonl` and the held-out documents of each language, `LANGUAGE.jsonl`; made once."""
    folder = runner.folder.parent / "languages"
    if (folder / "train.jsonl").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    train = bytearray()
    for language in LANGUAGES:
        held_out = bytearray()
        chunks = read_chunks(find_inputs([runner.require_text()]), Selection(keep=(("lang", language),)))
        for number, text in enumerate((one for chunk in chunks for one in chunk.parse().require_texts()), start=1):
            part = held_out if number % 10 == 0 and len(held_out) < HELD_OUT_BYTES else train
            part += json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        if held_out:
            write_atomically(folder / f"{language}.jsonl", bytes(held_out))
    write_atomically(folder / "train.jsonl", bytes(train))
    return folder


def _prepare_text(runner: ExperimentRunner, source: Path, size: int) -> Text:
    """Builds the tokenizer and the datasets of a vocabulary size, unless they exist."""
    folder = runner.folder.parent / f"multilingual-{size}"
    tokenizer, train = folder / "tokenizer.json", source / "train.jsonl"
    runner.make(tokenizer, "train_tokenizer.py", "--input", train, "--type", "multilingual", "--vocab-size", size)
    for file in sorted(source.glob("*.jsonl")):
        if not (folder / f"{file.stem}.idx").exists():
            preprocess([file], tokenizer, folder / file.stem)
    held_out = {file.stem: folder / file.stem for file in sorted(source.glob("??.jsonl"))}
    settings = [f"data.train={folder / 'train'}", f"data.tokenizer={tokenizer}", f"model.vocab_size={size}"]
    settings.append(f"data.validation={next(iter(held_out.values()))}")  # only one language, to save time
    return Text(settings, IndexedDataset(folder / "train"), held_out)


def _score_at_equal(runner: ExperimentRunner, size: int, text: Text, smallest_vocabulary_tokens: int) -> Iterator[Row]:
    """Yields a table row after as much text as the smallest vocabulary's run reads, and one after as much time;
    `smallest_vocabulary_tokens`: tokens of the text in that vocabulary."""
    step = min(STEPS, round(STEPS * text.train.num_tokens / smallest_vocabulary_tokens))
    name, info = f"headless-{size}", text.train.info
    assert info is not None
    checkpoints = training_overrides(STEPS, checkpoint_every=step, keep_checkpoints=STEPS // step + 1)
    run = runner.train("small-headless", name, *text.settings, *SETTINGS, *checkpoints)
    last = run.training[-1]
    for at, equal in ((step, "text"), (STEPS, "time")):
        bits = _bits_per_byte(runner, name, at, "pmi", text)
        megabytes = float(last["tokens"] / last["step"] * at * info.text_bytes / info.tokens / 1e6)
        row: Row = {"at equal": equal, "vocabulary": size, "steps": at, "MB of text": megabytes}
        yield row | {"bits per byte": mean(bits.values()), "ms a step": round(_step_milliseconds(run))}


def _compare_with_vanilla(runner: ExperimentRunner, size: int, text: Text) -> list[Row]:
    """Rows of vanilla in the time of the headless run, of headless with as many steps, and of the headless run."""

    def train(objective: str, name: str, steps: int, *more: str) -> RunMetrics:
        overrides = [*text.settings, *SETTINGS, f"objective.name={objective}", *training_overrides(steps), *more]
        return runner.train("small-headless", name, *overrides)

    step_ms = {}
    for objective in ("headless", "vanilla"):
        probe = train(objective, f"probe-{objective}-{size}", SHORT_STEPS, "schedule.warmup_steps=1")
        step_ms[objective] = _step_milliseconds(probe)
    steps = max(1, round(STEPS / (step_ms["vanilla"] / step_ms["headless"])))
    train("vanilla", f"vanilla-{size}", steps)
    train("headless", f"equal-text-{size}", steps)
    runs: tuple[tuple[str, int, str, HeadName], ...] = (
        ("vanilla", steps, f"vanilla-{size}", "trained"),
        ("headless", steps, f"equal-text-{size}", "pmi"),
        ("headless", STEPS, f"headless-{size}", "pmi"),
    )
    rows: list[Row] = []
    for objective, number, name, head in runs:
        bits = mean(_bits_per_byte(runner, name, number, head, text).values())
        row = {"vocabulary": size, "objective": objective, "steps": number, "bits per byte": bits}
        row |= {"ms a step": round(step_ms[objective]), "minutes": number * step_ms[objective] / 60_000}
        rows.append(row | {"times headless": step_ms[objective] / step_ms["headless"]})
    return rows


def _bits_per_byte(runner: ExperimentRunner, name: str, step: int, head: HeadName, text: Text) -> dict[str, float]:
    """Bits per byte by language; computed once."""
    path = runner.folder / name / f"held-out-{step}.json"
    if not path.exists():
        checkpoint = runner.folder / name / f"checkpoints/step-{step:08d}"
        results = evaluate_on_datasets(checkpoint, head, list(text.held_out.values()))
        found = {language: one.bits_per_byte for language, one in zip(text.held_out, results, strict=True)}
        write_atomically(path, json.dumps(found).encode())
    bits: dict[str, float] = json.loads(path.read_text())
    return bits


def _step_milliseconds(run: RunMetrics) -> float:
    last = run.training[-1]
    return 1e3 * float(last["tokens"]) / float(last["step"]) / tokens_per_second(run)
