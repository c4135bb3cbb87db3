"""The data commands: what they print, and exit code 2 with one sentence for a mistake."""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from megahead.commands.merge_datasets import find_datasets
from megahead.data.tokenizer import load_tokenizer

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command(tool, *arguments)` -> exit code, stdout, stderr."""

    def run(tool: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [tool, *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(TOOLS / tool), run_name="__main__")
        return int(exit_info.value.code or 0), *capsys.readouterr()

    return run


def test_from_text_to_a_dataset(command: Command, json_lines: Callable[..., Path], tmp_path: Path) -> None:
    text = json_lines([f"A [b]cat[/b] number {i} had tea." for i in range(30)])
    vocabulary, prefix = tmp_path / "t.json", tmp_path / "out" / "corpus"
    code, printed, _ = command("train_tokenizer.py", "--input", text, "--vocab-size", 280, "--output", vocabulary)
    assert (code, "bpe with 280 ids" in printed) == (0, True)
    files = ("--input", text, "--tokenizer", vocabulary, "--output", prefix)
    code, printed, _ = command("preprocess.py", *files, "--holdout", "0.1", "--workers", 1)
    assert (code, "30 documents (3 of them held out" in printed) == (0, True)
    code, printed, _ = command("inspect_dataset.py", prefix, "--tokenizer", vocabulary)
    assert code == 0
    assert "A [b]cat[/b] number 0 had tea.<|endoftext|>" in printed
    assert "match" in printed
    _, printed, _ = command("preprocess.py", *files, "--workers", 1)
    assert "corpus-validation has the same source: what an earlier call held out is trained on now" in printed


def test_shards_are_merged_and_warned_of(
    command: Command, json_lines: Callable[..., Path], tokenizer_path: Path, tmp_path: Path
) -> None:
    for shard in range(3):
        json_lines([f"A cat of house {shard}.", "", "tea"], name=f"part{shard}.jsonl")
    with (tmp_path / "part2.jsonl").open("ab") as file:
        file.write(b"broken\n")
    out = tmp_path / "out"
    files = ("--input", tmp_path / "part*.jsonl", "--tokenizer", tokenizer_path, "--output", out, "--per-file")
    code, printed, _ = command("preprocess.py", *files, "--on-error", "skip", "--holdout", 2)
    assert (code, "6 documents (3 of them held out, 3 empty skipped)" in printed) == (0, True)
    assert "broken, skipped: 1\n" in printed
    assert "part2.jsonl:4` must be one JSON object" in printed
    assert "part0.jsonl:2\n" in printed
    code, printed, _ = command("merge_datasets.py", "--input", out, "--output", tmp_path / "all")
    assert (code, "3 datasets, 3 sequences, 3 documents" in printed) == (0, True)
    code, printed, _ = command("inspect_dataset.py", tmp_path / "all", "--end-token", 7)
    assert (code, "the end token 7 never occurs" in printed) == (0, True)
    code, _, says = command("merge_datasets.py", "--input", tokenizer_path.parent, "--output", tmp_path / "none")
    assert (code, "must hold datasets" in says) == (2, True)


def test_encoders_get_tokens_of_their_own(command: Command, tokenizer_path: Path, tmp_path: Path) -> None:
    extended = tmp_path / "encoder.json"
    code, printed, _ = command("train_tokenizer.py", "--extend", tokenizer_path, "--output", extended)
    assert (code, "extended with 283 ids" in printed) == (0, True)
    before, after = load_tokenizer(tokenizer_path), load_tokenizer(extended)
    assert [after.id_of(token) for token in ("[CLS]", "[SEP]", "[MASK]", "<|padding|>")] == [280, 281, 282, 1]
    assert after.encode_batch(["A cat had tea."]) == before.encode_batch(["A cat had tea."])
    assert after.encode_batch(["[MASK]"]) == [[282]]
    assert command("train_tokenizer.py", "--extend", extended, "--output", extended)[0] == 0
    assert load_tokenizer(extended).vocab_size == 283  # once is enough


@pytest.mark.parametrize("option", ["--type bpe", "--vocab-size 300", "--max-bytes 1e6", "--keep lang=de"])
def test_options_of_training_are_refused_where_nothing_is_trained(command: Command, option: str) -> None:
    code, _, says = command("train_tokenizer.py", "--extend", "t.json", *option.split(), "--output", "u.json")
    assert (code, f"{option.split()[0]} " in says) == (2, True)


def test_a_tokenizer_gets_what_a_language_needs(
    command: Command, json_lines: Callable[..., Path], tokenizer_path: Path, tmp_path: Path
) -> None:
    texts = ["Ein Hund und eine Katze trinken Tee"] * 4
    more = [json.dumps({"text": text, "lang": "de"}) for text in texts]
    (tmp_path / "more.jsonl").write_text("\n".join([*more, json.dumps({"text": "zzyzx " * 50, "lang": "en"})]))
    extended, given = tmp_path / "t.json", ("--extend", tokenizer_path, "--input", tmp_path / "more.jsonl")
    code, printed, _ = command(
        "train_tokenizer.py", *given, "--keep", "lang=de", "--vocab-size", 290, "--output", extended
    )
    assert (code, "extended with 290 ids" in printed) == (0, True)
    before, after = load_tokenizer(tokenizer_path), load_tokenizer(extended)
    assert len(after.encode_batch(texts)[0]) < len(before.encode_batch(texts)[0])
    assert after.encode_batch(["zzyzx"]) == before.encode_batch(["zzyzx"])
    assert command("train_tokenizer.py", *given, "--output", extended)[0] == 2  # no --vocab-size
    assert command("train_tokenizer.py", "--output", extended)[0] == 2


def test_a_sentencepiece_model_cannot_be_extended(
    command: Command, json_lines: Callable[..., Path], tmp_path: Path
) -> None:
    model, text = io.BytesIO(), iter(["A cat had tea, and a dog had a cat."] * 50)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_writer=model, vocab_size=30, hard_vocab_limit=False, minloglevel=2
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    code, _, says = command("train_tokenizer.py", "--extend", tmp_path / "t.model", "--output", tmp_path / "t.json")
    assert (code, "`--extend` must be a tokenizer.json" in says) == (2, True)


@pytest.mark.slow
def test_the_benchmark_compares(
    command: Command, json_lines: Callable[..., Path], tokenizer_path: Path, tmp_path: Path
) -> None:
    text = json_lines(["A cat had tea."] * 500)
    files = ("--input", text, "--tokenizer", tokenizer_path)
    code, printed, _ = command("bench_preprocess.py", *files, "--rounds", 1, "--skip", "datasets")
    assert (code, "loop" in printed, "preprocess.py" in printed) == (0, True, True)
    code, _, says = command("bench_preprocess.py", "--input", text, "--tokenizer", tmp_path / "none", "--rounds", 1)
    assert (code, "`preprocess.py` must run to its end to be timed" in says) == (2, True)


def test_a_mistake_is_one_sentence(
    command: Command, json_lines: Callable[..., Path], tokenizer_path: Path, tmp_path: Path
) -> None:
    text = json_lines(["fine"])
    text.write_bytes(text.read_bytes() + b"not json\n")
    files = ("--input", text, "--tokenizer", tokenizer_path, "--output", tmp_path / "out", "--workers", 1)
    code, _, says = command("preprocess.py", *files)
    assert (code, "text.jsonl:2` must be one JSON object" in says) == (2, True)
    assert list(tmp_path.glob("out*")) == []
    code, _, says = command("preprocess.py", *files, "--holdout", "many")
    assert (code, "`--holdout` must be a number" in says) == (2, True)
    code, _, says = command("inspect_dataset.py", tmp_path / "out")
    assert (code, "out.idx` must exist" in says) == (2, True)


def test_a_tokenizer_is_trained_on_any_number_of_bytes_and_never_replaces_its_text(
    command: Command, json_lines: Callable[..., Path], tmp_path: Path
) -> None:
    text = json_lines(["A cat had tea."] * 9)
    files = ("--input", text, "--output", tmp_path / "t.json", "--vocab-size")
    for max_bytes in ("inf", "1e30", "1.5"):
        assert command("train_tokenizer.py", *files, 260, "--max-bytes", max_bytes)[0] == 0
    code, _, says = command("train_tokenizer.py", *files, 260, "--max-bytes", "-1")
    assert (code, "`--max-bytes` must be at least 1, but is -1.0 instead." in says) == (2, True)
    code, _, says = command("train_tokenizer.py", *files, 10**20)
    assert (code, "`vocab_size` must be below 2,147,483,648, but is 100,000," in says) == (2, True)
    text = text.rename(tmp_path / "text.json")
    code, _, says = command("train_tokenizer.py", "--input", text, "--output", text, "--vocab-size", 260)
    assert (code, "`--output` must be another file than --input" in says) == (2, True)
    assert "A cat had tea." in text.read_text()


def test_what_tables_hold_out_is_not_merged_with_what_they_train_on(tmp_path: Path) -> None:
    """A text that happens to be called `NAME-test` is merged."""
    for name in ("a", "a-test", "a-validation", "b-test", "c-validation", "en", "en-test"):
        (tmp_path / f"{name}.idx").touch()
    (tmp_path / "a-items.json").touch()
    assert [prefix.name for prefix in find_datasets(tmp_path)] == ["a", "b-test", "en-test", "en"]


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("preprocess.py", ["--input", "", "--tokenizer", "T", "--output", "O"], "an input must be the name of a file"),
        (
            "train_tokenizer.py",
            ["--input", "nowhere", "--vocab-size", 300, "--output", "."],
            "`--output` must name a file, but is the folder .",
        ),
        ("train_tokenizer.py", ["--input", "", "--vocab-size", 300, "--output", "O"], "an input must be the name of a"),
        ("train_tokenizer.py", ["--extend", "T", "--output", ""], "`--output` must name a file, but is the folder ."),
        ("merge_datasets.py", ["--input", "", "--output", "O"], "--input must name datasets, but one is empty"),
        (
            "preprocess.py",
            ["--table", "T", "--output", "O", "--holdout", 9],
            "`--holdout` must be left out with --table",
        ),
        ("preprocess.py", ["--input", "T", "--output", "O", "--user", "u"], "`--user` must be left out with --input"),
        ("start.py", [""], "`` must exist, but does not"),
        ("start.py", ["T", "--minutes", "nan"], "`--minutes` must be at least 1, but is nan instead"),
        ("start.py", ["T", "--minutes", "inf"], "`--minutes` must be at least 1, but is inf instead"),
        (
            "estimate.py",
            ["--config", "demo-headless", "--memory", "nan"],
            "`--memory` must be at least 0, but is nan instead",
        ),
        (
            "estimate.py",
            ["--config", "demo-headless", "--peak", "nan"],
            "must be above 0 and finite, but is nan instead",
        ),
    ],
)
def test_options_that_would_mean_something_else_or_nothing_are_refused(
    command: Command, tokenizer_path: Path, tmp_path: Path, tool: str, arguments: list[object], sentence: str
) -> None:
    names = {"T": tokenizer_path, "O": tmp_path / "out"}
    code, _, says = command(tool, *(names.get(str(argument), argument) for argument in arguments))
    assert (code, sentence in says) == (2, True)
