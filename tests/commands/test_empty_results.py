"""A command whose result would be empty ends in one sentence, and what was there before stays byte for byte."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from megahead.__main__ import main
from megahead.commands import COMMANDS
from megahead.data.indexed import IndexedDataset
from megahead.evaluate.glue_tasks import TASKS as CLASSIFICATION
from megahead.evaluate.harness_tasks import TASKS
from support.dataset_fixtures import write_empty
from support.forked import run_script
from support.small_checkpoint import save_small, save_tokenizer, small_config

KINDS = {"nothing.jsonl": "", "blank.jsonl": "\n \n\n", "keyless.jsonl": '{"words": "the cat"}\n' * 3, "folder": None}
"""Inputs of which nothing can be made."""

LINES = (
    "preprocess --input X --tokenizer run/tokenizer.json --output out/text",
    "preprocess --input X --tokenizer run/tokenizer.json --output out/text --holdout 2 --on-error skip",
    "preprocess --input X --tokenizer run/tokenizer.json --output out --per-file --on-error skip",
    "train-tokenizer --input X --vocab-size 300 --output out/t.json",
    "train-tokenizer --input X --vocab-size 300 --type sentencepiece --output out/t.json",
    "train-tokenizer --input X --vocab-size 300 --extend run/tokenizer.json --output out/t.json",
    "merge-datasets --input X --output out/text --overwrite",
    "merge-datasets --input empty/text --output out/text --overwrite",
    "inspect-dataset X",
    "estimate --config X",
    "pretrain --config X",
    "convert to-hf --checkpoint X --head pmi --output out/hf",
    "convert from-hf --model X --output out/run",
    "convert revocabulary --model run --tokenizer X --output out/run",
    "start X --folder out/start",
    "generate --model run --file X --output out/samples.jsonl",
    "embed --model run --pooling cls --input X --output out/n.npy",
    "finetune --model run --task glue --data X --output out/results.json",
    "finetune --model run --task glue/rte superglue/wic --data data --output out/results.json",
    "finetune --model run --task superglue/wic --data data --output out/results.json",
    *(f"eval-harness --model run --tasks {name} --data data --output out/results.json" for name in ("sciq", "blimp")),
    "eval-harness --model run --tasks cloze --cloze X --output out/results.json",
    "eval-harness --model run --tasks bits_per_byte --text X --output out/results.json",
    "pseudo-perplexity --model run --input X",
    "synonyms --model run --wordnet X --output out/figure.png",
    "plot X --output out/figure.png",
    "report X --output out/page.html",
    "inspect-checkpoint X",
)  # fmt: skip
"""X: the input; `data` holds it under the names of published files."""

Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """`say(words)` -> exit code and stderr of a command in the test's folder."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "run/tokenizer.json")

    def run(words: str) -> tuple[int, str]:
        if words.startswith("pretrain"):  # ends its process
            done = run_script("-m", "megahead", *words.split(), cwd=tmp_path)
            return done.returncode, done.stderr
        monkeypatch.setattr(sys, "argv", ["megahead", *words.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), capsys.readouterr().err

    return run


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def put(path: Path, content: str | None) -> None:
    """A file, or an empty folder for None."""
    (path.parent if content is not None else path).mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_text(content)


def put_published(content: str | None) -> None:
    """As files of tasks under their published names."""
    files = [
        file
        for name in ("glue/rte", "superglue/wic")
        for form in CLASSIFICATION[name].files
        for file in (form.train, form.dev)
    ]
    for name in (*files, str(TASKS["sciq"].file), f"{TASKS['blimp'].file}/adjunct.jsonl"):
        put(Path("data", name), content)


def put_results() -> None:
    """What earlier commands left where results go."""
    for ending in ("bin", "idx", "json"):
        for name in ("text", "text-validation", "nothing", "blank", "keyless", "folder"):
            put(Path(f"out/{name}.{ending}"), f"old {name}")
    for name in ("t.json", "n.npy", "samples.jsonl", "figure.png", "page.html", "hf/config.json", "run/config.yaml"):
        put(Path("out", name), "old")
    put(Path("out/results.json"), "[]")


@pytest.mark.parametrize("line", LINES)
def test_an_empty_result_is_an_error_and_replaces_nothing(say: Say, line: str) -> None:
    write_empty(Path("empty/text"))
    encoder = {"masking": {"mask_token": 4, "cls_token": 2, "sep_token": 3}, "data": {"end_token": 3}}
    reads_encoders = line.split()[0] in ("embed", "pseudo-perplexity")  # which would refuse a decoder, and so pass here
    model = {"vocab_size": 300} | ({"family": "bert"} if reads_encoders else {})
    save_small(Path("run"), small_config(model=model, **(encoder if reads_encoders else {})))
    put_results()
    for name, content in KINDS.items():
        if name == "keyless.jsonl" and line.startswith("generate"):  # these are prompts
            continue
        put(Path("in", name), content)
        shutil.rmtree("data", ignore_errors=True)
        put_published(content)
        before = everything(Path())
        code, says = say(line.replace(" X", f" in/{name}"))
        assert (code, says.count("error: "), says.count("Traceback")) == (2, 1, 0), (name, says)
        assert says.strip().splitlines()[-1].startswith("error: "), (name, says)
        assert "must hold an encoder" not in says
        assert everything(Path()) == before, name


def test_every_command_that_reads_something_is_asked() -> None:
    asked = {line.split()[0].replace("-", "_") for line in LINES}
    assert asked == {name for commands in COMMANDS.values() for name in commands} - {"doctor"}


FILES = "--tokenizer run/tokenizer.json --output out/text"


@pytest.mark.parametrize(
    ("documents", "options", "sentence"),
    [
        (["", " "], "", "`out/text` must have at least one document, but its input gives none: 2 without text."),
        (["a"] * 3, "--drop text=a", "input gives none: 3 not wanted (--keep, --drop)."),
        (["a"], "--holdout 20", "`holdout` must hold out a document of `out/text`, but is 1/20 of 1 document instead; give --holdout-tail 0.05, which holds out the end of each document."),
        (["a"] * 30, "--holdout 0.01", "but is 1/100 of 30 documents instead; give an N of at most 30, or add documents."),
        (["a"] * 30, "--holdout 31", "but is 1/31 of 30 documents instead; give an N of at most 30, or add documents."),
    ],
)  # fmt: skip
def test_a_dataset_or_a_held_out_part_without_documents_is_refused(
    say: Say, documents: list[str], options: str, sentence: str
) -> None:
    put_results()
    put(Path("text.jsonl"), "".join(f"{orjson.dumps({'text': text}).decode()}\n" for text in documents))
    before = everything(Path())
    code, says = say(f"preprocess --input text.jsonl {FILES} {options}")
    assert (code, sentence in says) == (2, True), says
    code, says = say(f"preprocess --input text.jsonl {FILES} --per-file {options}")
    assert (code, sentence.replace("out/text", "out/text/text") in says) == (2, True), says
    assert everything(Path()) == before


def test_the_largest_and_the_smallest_share_leave_documents_on_both_sides(say: Say) -> None:
    put(Path("text.jsonl"), '{"text": "a"}\n' * 30)
    for share, held in (("30", 1), ("0.999", 29)):
        assert say(f"preprocess --input text.jsonl {FILES} --holdout {share}")[0] == 0
        assert (len(IndexedDataset("out/text")), len(IndexedDataset("out/text-validation"))) == (30 - held, held)


def test_shards_without_a_document_are_told_also_when_an_earlier_version_finished_them(say: Say) -> None:
    put(Path("full.jsonl"), '{"text": "a"}\n')
    put(Path("hollow.jsonl"), "")
    line = "preprocess --input full.jsonl hollow.jsonl --tokenizer run/tokenizer.json --output out --per-file"
    code, says = say(line)
    assert (code, "`out/hollow` must have at least one document" in says) == (2, True), says
    assert len(IndexedDataset("out/full")) == 1
    manifest = orjson.loads(Path("out/manifest.json").read_bytes())
    stat = Path("hollow.jsonl").stat()
    noted = {"path": "hollow.jsonl", "bytes": 0, "changed": stat.st_mtime_ns}
    manifest["shards"]["hollow"] = {"input": noted, "report": {}}
    Path("out/manifest.json").write_bytes(orjson.dumps(manifest))
    write_empty(Path("out/hollow"))
    before = everything(Path())
    code, says = say(line)
    assert (code, "`out/hollow` must have at least one document" in says) == (2, True), says
    assert everything(Path()) == before
    assert say(line.replace(" hollow.jsonl", ""))[0] == 0
