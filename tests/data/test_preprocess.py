"""From text files to datasets: every document once, exactly tokenized, in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import sentencepiece

from megahead.data import compression, sources
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import encoding_pool, preprocess
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, read_chunks
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import ProgressBar
from megahead.errors import DataError, FieldError

JsonLines = Callable[..., Path]
TEXTS = [f"The cat number {i} said 語 {'and tea ' * (i % 7)}\n" for i in range(95)]


def documents(prefix: Path | str) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def expected(tokenizer_path: Path, texts: list[str]) -> list[list[int]]:
    return [[*ids, 0] for ids in load_tokenizer(tokenizer_path).encode_batch(texts)]


def test_each_document_ends_with_the_end_token(tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path) -> None:
    files = [json_lines(TEXTS[:50], name="a.jsonl"), json_lines(TEXTS[50:], name="b.jsonl")]
    report = preprocess(files, tokenizer_path, tmp_path / "out")
    assert documents(tmp_path / "out") == expected(tokenizer_path, TEXTS)
    info = IndexedDataset(tmp_path / "out").info
    assert info is not None
    assert info.text_bytes == report.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert info.token_counts[0] == info.documents == report.documents == 95
    assert (info.vocab_size, info.tokenizer, info.source) == (280, "tokenizer.json", "a.jsonl, b.jsonl")
    assert report.engine == "fastokens"


@pytest.mark.parametrize("empty", [["", " \n"], ["\t"] * 9])
def test_empty_documents_are_counted_and_left_out(
    tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path, empty: list[str]
) -> None:
    texts = [*empty, "one", *empty, "two", ""]
    report = preprocess([json_lines(texts)], tokenizer_path, tmp_path / "out")
    assert (report.documents, report.skipped) == (2, 2 * len(empty) + 1)
    assert documents(tmp_path / "out") == expected(tokenizer_path, ["one", "two"])


def test_the_end_of_each_document_is_held_out(tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path) -> None:
    texts = ["word", "one two three four five six seven eight nine ten", "a line\n" * 20]
    report = preprocess([json_lines(texts)], tokenizer_path, tmp_path / "out", holdout_tail=Fraction("0.2"))
    assert documents(tmp_path / "out") == expected(tokenizer_path, ["word", texts[1][:33], "a line\n" * 15 + "a line"])
    assert documents(tmp_path / "out-validation") == expected(tokenizer_path, ["eight nine ten", "a line\n" * 4])
    assert (report.documents, report.held_out) == (5, 2)
    with pytest.raises(FieldError, match=r"`holdout_tail` must hold out the end of a document of .*; add longer"):
        preprocess([json_lines(["word"])], tokenizer_path, tmp_path / "one", holdout_tail=Fraction("0.2"))


@pytest.mark.parametrize("holdout", [Fraction("0.1"), 10])
def test_every_tenth_document_is_held_out(
    tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdout: Fraction
) -> None:
    for module in (compression, sources):  # the count goes on over chunks
        monkeypatch.setattr(module, "BLOCK_BYTES", 500)
    report = preprocess([json_lines(["", *TEXTS])], tokenizer_path, tmp_path / "out", holdout=holdout)
    assert (report.documents, report.held_out) == (95, 9)
    assert documents(tmp_path / "out-validation") == expected(tokenizer_path, TEXTS[9::10])
    del (kept := list(TEXTS))[9::10]
    assert documents(tmp_path / "out") == expected(tokenizer_path, kept)


@pytest.mark.parametrize("share", [Fraction(0.02), Fraction("0.02000000000000000000001")])
def test_a_share_of_many_digits_is_exact(tmp_path: Path, tokenizer_path: Path, share: Fraction) -> None:
    """Of more than a thousand documents: their products with 16 digits exceed 64 bits."""
    (tmp_path / "a.json").write_bytes(orjson.dumps(["tea"] * 4_000))
    report = preprocess(tmp_path / "a.json", tokenizer_path, tmp_path / "out", holdout=share)
    assert (report.documents, report.held_out) == (4_000, 80)


def test_files_that_are_too_few_to_hold_one_out_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"{k}.md").write_text("words")
    with pytest.raises(
        FieldError, match=r"`holdout` must hold .*, but is 1/100 of 3 documents instead; give an N of at"
    ):
        preprocess(tmp_path, "unused", tmp_path / "out", holdout=100)
    with pytest.raises(FieldError, match=r"1/2 of 1 document instead; give --holdout-tail 0\.05"):
        preprocess(tmp_path / "0.md", "unused", tmp_path / "out", holdout=2)


@pytest.mark.parametrize("holdout", [0, 1, -2, Fraction(-1, 10), 1.5, Fraction(5, 2)])
def test_a_holdout_that_is_none_is_refused(json_lines: JsonLines, tmp_path: Path, holdout: Fraction) -> None:
    with pytest.raises(FieldError, match="`holdout` must be a fraction"):
        preprocess([json_lines(TEXTS)], "unused", tmp_path / "out", holdout=holdout)


@pytest.mark.slow
def test_workers_do_not_change_the_result(
    tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", 300)
    path = json_lines(TEXTS)
    for workers in (1, 2):
        preprocess([path], tokenizer_path, tmp_path / f"out{workers}", holdout=7, workers=workers)
    for ending in (".bin", ".idx", ".json", "-validation.bin"):
        assert (tmp_path / f"out1{ending}").read_bytes() == (tmp_path / f"out2{ending}").read_bytes()
    with path.open("ab") as file:
        file.write(b"broken\n")
    with pytest.raises(DataError, match=r"text\.jsonl:96` must be one JSON object"):
        preprocess([path], tokenizer_path, tmp_path / "broken", workers=2)
    assert list(tmp_path.glob("broken*")) == []


@pytest.mark.slow
def test_ctrl_c_is_left_to_the_command_and_its_workers_print_no_traceback() -> None:
    with encoding_pool(2) as encode:
        assert list(encode(cast("Any", [signal.SIGINT] * 4), cast("Any", signal.raise_signal))) == [None] * 4


def test_a_broken_line_leaves_the_old_dataset(tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path) -> None:
    path = json_lines(TEXTS)
    preprocess([path], tokenizer_path, tmp_path / "out", holdout=10)
    before = {file: file.read_bytes() for file in tmp_path.glob("out*")}
    with path.open("ab") as file:
        file.write(b'{"text": "no end\n')
    with pytest.raises(DataError, match=r"text\.jsonl:96`"):
        preprocess([path], tokenizer_path, tmp_path / "out", holdout=10)
    assert {file: file.read_bytes() for file in tmp_path.glob("out*")} == before


def test_the_end_token_must_be_known(tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path) -> None:
    with pytest.raises(
        FieldError, match=r"`--end-token` must be a token of .* but is </s> instead; name <\|endoftext\|>\.$"
    ):
        preprocess([json_lines(TEXTS)], tokenizer_path, tmp_path / "out", end_token="</s>")


def test_inputs_are_checked_before_anything_is_written(tokenizer_path: Path, json_lines: JsonLines) -> None:
    path = json_lines(TEXTS)
    (path.parent / "a.doc").touch()
    for wrong, says in (("missing.jsonl", "there is none"), ("doks", "there is none"), ("a.doc", "must end in one of")):
        with pytest.raises(DataError, match=says):
            preprocess([path, path.parent / wrong], tokenizer_path, path.parent / "out")
    with pytest.raises(DataError, match="at least one input"):
        preprocess([], tokenizer_path, path.parent / "out")
    assert list(path.parent.glob("out*")) == []


@pytest.mark.parametrize("name", ["en_wikipedia", "multilingual_19lang"])
def test_real_text_equals_the_reference_tokenizer(shared_data: Path, tmp_path: Path, name: str) -> None:
    source = find_inputs([shared_data / "text" / f"{name}.jsonl.zst"])
    texts = next(read_chunks(source, Selection())).parse().require_texts()[:60]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in texts))
    vocabulary = shared_data / "tokenizers" / "20B_tokenizer.json"
    report = preprocess([path], vocabulary, tmp_path / "out")
    assert report.engine == "fastokens"
    flat = np.concatenate(expected(vocabulary, texts))
    assert np.array_equal(IndexedDataset(tmp_path / "out").read(0, len(flat)), flat)


def test_broken_lines_can_be_skipped_and_are_reported(
    tokenizer_path: Path, json_lines: JsonLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", 300)
    path = json_lines([*TEXTS, ""])
    lines = path.read_bytes().splitlines()
    lines[10:10], lines[50:50] = [b'{"text": "\xff"}'], [b"{", b'{"body": "x"}']
    path.write_bytes(b"\n".join(lines))
    report = preprocess([path], tokenizer_path, tmp_path / "out", on_error="skip")
    assert documents(tmp_path / "out") == expected(tokenizer_path, TEXTS)
    assert (report.documents, report.broken, report.skipped) == (95, 3, 1)
    assert [problem.split("`")[1] for problem in report.problems] == [f"{path}:{line}" for line in (11, 51, 52)]
    assert report.empty_places == [f"{path}:99"]


def test_a_filter_by_the_piles_set_names(tokenizer_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "pile.jsonl"
    records = [{"text": text, "meta": {"pile_set_name": "ABC"[i % 3]}} for i, text in enumerate(TEXTS)]
    path.write_bytes(b"\n".join(map(orjson.dumps, records)))
    chosen = Selection(drop=(("meta.pile_set_name", "B"), ("meta.pile_set_name", "C")))
    report = preprocess([path], tokenizer_path, tmp_path / "out", selection=chosen)
    assert documents(tmp_path / "out") == expected(tokenizer_path, TEXTS[::3])
    assert (report.documents, report.left_out) == (32, 63)


def test_a_sentencepiece_model(tmp_path: Path, json_lines: JsonLines) -> None:
    model = tmp_path / "t.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "t"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    report = preprocess([json_lines(TEXTS)], model, tmp_path / "out")
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert documents(tmp_path / "out") == [[*library.encode(text), library.eos_id()] for text in TEXTS]
    assert report.engine == "sentencepiece"
    model.write_bytes(b"nothing")
    with pytest.raises(DataError, match="must be a SentencePiece model"):
        preprocess([json_lines(TEXTS)], model, tmp_path / "out")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer_path: Path) -> None:
    """Twenty times the text must not take over 60 MB more; one document of 50 MB is legal."""
    sizes = {"small": 5, "big": 100}
    for name, megabytes in sizes.items():
        with (tmp_path / f"{name}.jsonl").open("wb") as file:
            line = orjson.dumps({"text": "The cat of tea is a cat too.\n" * 350}) + b"\n"
            for _ in range(megabytes * 100):
                file.write(line)
    (tmp_path / "one.jsonl").write_bytes(orjson.dumps({"text": "The cat of tea is a cat too.\n" * 1_750_000}))
    peak = {name: peak_megabytes(tmp_path / f"{name}.jsonl", tokenizer_path) for name in (*sizes, "one")}
    assert peak["big"] < peak["small"] + 60
    assert len(IndexedDataset(tmp_path / "one")) == 1
    assert IndexedDataset(tmp_path / "one").num_tokens > 10_000_000


def peak_megabytes(path: Path, tokenizer_path: Path) -> float:
    program = (
        "import sys; from megahead.data.preprocess import preprocess; "
        "preprocess([sys.argv[1]], sys.argv[2], sys.argv[3]); "  # `ru_maxrss` would be at least that of this process
        "print(next(int(line.split()[1]) / 1e3 for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    arguments = [sys.executable, "-c", program, path, tokenizer_path, path.with_suffix("")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([*map(str, arguments)], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)


def test_a_bar_ends_with_the_text_that_was_read_and_its_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    with ProgressBar("Reading") as bar:
        bar.start(3)
        for _ in range(3):
            now += 2.0
            bar.advance(1, 40_000_000)
    (text, rate), *_ = re.findall(r"100 % (\d+) MB, ([\d.]+) MB/s", capsys.readouterr().err)
    assert (text, rate) == ("120", "20.0"), "120 MB in 6 s"


@pytest.mark.parametrize("name", ["text", "text-validation"])
def test_a_dataset_never_replaces_its_text(tokenizer_path: Path, tmp_path: Path, name: str) -> None:
    text = tmp_path / f"{name}.json"
    text.write_bytes(content := orjson.dumps(["tea"] * 9))
    (tmp_path / "link.json").symlink_to(text)
    for file in (text, tmp_path / "link.json", tmp_path):
        with pytest.raises(DataError, match=r"json` must not be named like the dataset's description"):
            preprocess(file, tokenizer_path, tmp_path / "text", holdout=2)
    assert text.read_bytes() == content
