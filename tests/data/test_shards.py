"""One dataset a file, and a run that goes on after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import orjson
import psutil
import pytest

from megahead.data import shards
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import Recipe, preprocess
from megahead.data.records import Selection
from megahead.data.shards import preprocess_shards
from megahead.errors import DataError
from megahead.files import AtomicFile, InUseError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess.py"
JsonLines = Callable[..., Path]


def texts(shard: int, count: int = 40) -> list[str]:
    return [f"The cat number {i} of house {shard} had tea.\n" for i in range(count)]


@pytest.fixture
def files(json_lines: JsonLines) -> list[Path]:
    return [json_lines(texts(shard), name=f"part-{shard}.jsonl") for shard in range(4)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


def test_each_file_becomes_what_it_would_alone(files: list[Path], tokenizer_path: Path, tmp_path: Path) -> None:
    recipe = Recipe(tokenizer=tokenizer_path, holdout=Fraction(1, 10))
    report = preprocess_shards([tmp_path / "part-*.jsonl"], recipe, tmp_path / "out")
    assert (report.documents, report.held_out) == (160, 16)
    for file in files:
        preprocess([file], tokenizer_path, tmp_path / "alone" / file.stem, holdout=10)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert not (tmp_path / "out" / "in-use.partial").exists()


def test_inputs_that_would_write_the_same_files_are_refused(
    tokenizer_path: Path, tmp_path: Path, json_lines: JsonLines
) -> None:
    named = {name: json_lines(["text"], name=f"{name}.jsonl") for name in ("wiki", "wiki-validation", "manifest")}
    recipe, out = Recipe(tokenizer=tokenizer_path, holdout=Fraction(1, 2)), tmp_path / "out"
    for first, second in (("wiki", "wiki-validation"), ("wiki-validation", "wiki")):
        with pytest.raises(
            DataError, match=rf"{first}\.jsonl` and .*{second}\.jsonl` would both write wiki-validation;"
        ):
            preprocess_shards([named[first], named[second]], recipe, out)
    with pytest.raises(DataError, match=r"the list of shards and .*manifest\.jsonl` would both write manifest;"):
        preprocess_shards([named["manifest"]], recipe, out)
    assert not out.exists()
    both = [named["wiki"], named["wiki-validation"]]
    assert preprocess_shards(both, Recipe(tokenizer=tokenizer_path), out).documents == 2


def test_only_what_is_missing_or_changed_is_made_again(
    files: list[Path], tokenizer_path: Path, tmp_path: Path, json_lines: JsonLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    write = shards.write_dataset
    monkeypatch.setattr(
        shards,
        "write_dataset",
        lambda chunks, recipe, out, *rest: (made.append(out.name), write(chunks, recipe, out, *rest))[1],
    )
    recipe = Recipe(tokenizer=tokenizer_path)
    first = preprocess_shards(files, recipe, tmp_path / "out")
    again = preprocess_shards(files, recipe, tmp_path / "out")
    assert made == [file.stem for file in files]
    assert first == again
    (tmp_path / "out" / "part-1.idx").unlink()
    (tmp_path / "out" / "part-2.bin").write_bytes(b"short")
    json_lines(texts(3, 50), name="part-3.jsonl")
    made.clear()
    assert preprocess_shards(files, recipe, tmp_path / "out").documents == 170
    assert made == ["part-1", "part-2", "part-3"]


@pytest.mark.slow
def test_a_killed_run_continues(json_lines: JsonLines, tokenizer_path: Path, tmp_path: Path) -> None:
    """SIGKILL while a shard is written and named: what stands under a final name is always whole, and the end result is
    the same."""
    files = [json_lines(texts(shard, 5000), name=f"part-{shard}.jsonl") for shard in range(6)]
    preprocess_shards(files, Recipe(tokenizer=tokenizer_path), tmp_path / "whole")
    out = tmp_path / "out"
    command = [sys.executable, TOOL, "--input", *files, "--tokenizer", tokenizer_path, "--output", out, "--per-file"]
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    for number, ending in enumerate(("bin*", "bin", "json", "idx")):
        process = subprocess.Popen([*map(str, command), "--workers", "1"], stderr=subprocess.DEVNULL, env=environment)
        while process.poll() is None and not is_written(out, f"part-{number}.{ending}"):
            time.sleep(0.0005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        finished = {path.stem for path in out.glob("*.idx")}
        assert len(finished) >= number
        for name in finished:
            dataset = IndexedDataset(out / name)
            assert len(dataset) == 5000
            assert dataset.info is not None
        manifest = out / "manifest.json"
        noted = orjson.loads(manifest.read_bytes())["shards"] if manifest.exists() else {}
        assert set(noted) <= finished
    subprocess.run([*map(str, command), "--workers", "1"], check=True, capture_output=True, env=environment)
    assert contents(out) == contents(tmp_path / "whole")


def is_written(folder: Path, pattern: str) -> bool:
    with suppress(FileNotFoundError):
        return any(path.stat().st_size for path in folder.glob(pattern))
    return True  # it has got its name meanwhile


@pytest.mark.slow
def test_workers_end_with_a_killed_command(json_lines: JsonLines, tokenizer_path: Path, tmp_path: Path) -> None:
    file = json_lines(texts(0, 300_000))
    command = [sys.executable, TOOL, "--input", file, "--tokenizer", tokenizer_path, "--output", tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    process = subprocess.Popen([*map(str, command), "--workers", "2"], stderr=subprocess.DEVNULL, env=environment)
    family = psutil.Process(process.pid)
    while len(family.children(recursive=True)) < 4 and process.poll() is None:  # fork server, its helper, two workers
        time.sleep(0.005)
    workers = family.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_a_dataset_half_renamed_is_made_again(
    files: list[Path], tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(tokenizer=tokenizer_path)
    publish = AtomicFile.publish

    def power_cut(file: AtomicFile) -> None:
        if file.path.name == "part-1.idx":
            raise SystemExit
        publish(file)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "publish", power_cut)
        with pytest.raises(SystemExit):
            preprocess_shards(files, recipe, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.idx")) == ["part-0.idx"]
    assert preprocess_shards(files, recipe, tmp_path / "out").documents == 160
    assert len(IndexedDataset(tmp_path / "out" / "part-1")) == 40


def test_other_settings_are_refused(files: list[Path], tokenizer_path: Path, tmp_path: Path) -> None:
    preprocess_shards(files, Recipe(tokenizer=tokenizer_path), tmp_path / "out")
    other = Recipe(tokenizer=tokenizer_path, selection=Selection("body"), on_error="skip")
    with pytest.raises(DataError, match="differs in selection, on_error; give another folder"):
        preprocess_shards(files, other, tmp_path / "out")
    held_out = Recipe(tokenizer=tokenizer_path, holdout_tail=Fraction(1, 20))
    preprocess_shards(files, held_out, tmp_path / "held-out")
    with pytest.raises(DataError, match="differs in tail; give another folder"):
        preprocess_shards(files, Recipe(tokenizer=tokenizer_path), tmp_path / "held-out")
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="must be a manifest of shards"):
        preprocess_shards(files, other, tmp_path / "out")


def test_inputs_that_cannot_be_shards(files: list[Path], tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "part-0.jsonl"
    twin.write_bytes(files[0].read_bytes())
    for inputs, says in (([files[0], twin], "would both write part-0"), (["-"], "is standard input")):
        with pytest.raises(DataError, match=says):
            preprocess_shards(inputs, Recipe(tokenizer=tokenizer_path), tmp_path / "out")


def test_two_runs_in_one_folder_do_not_mix(files: list[Path], tokenizer_path: Path, tmp_path: Path) -> None:
    other = AtomicFile(tmp_path / "out" / "in-use")
    with pytest.raises(InUseError, match=r"in-use\.partial` must not be in use"):
        preprocess_shards(files, Recipe(tokenizer=tokenizer_path), tmp_path / "out")
    other.discard()


def test_a_shard_never_replaces_its_text(tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content := orjson.dumps(["tea"]))
    with pytest.raises(DataError, match=r"a\.json` must not be named like the dataset's description"):
        preprocess_shards([tmp_path / "a.json"], Recipe(tokenizer=tokenizer_path), tmp_path)
    assert (tmp_path / "a.json").read_bytes() == content


def test_a_shard_of_an_archive_with_a_name_in_latin1_is_finished(tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "tea"}\n{"text": ""}\n')
    with tarfile.open(tmp_path / "all.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "a.jsonl", "café.jsonl")
    for _ in range(2):
        report = preprocess_shards([tmp_path / "all.tar"], Recipe(tokenizer=tokenizer_path), tmp_path / "out")
        assert report.documents == 1


def test_end_tokens_that_were_reported_are_refused_when_a_later_call_refuses_them(
    tokenizer_path: Path, tmp_path: Path, json_lines: JsonLines
) -> None:
    files = [json_lines(["tea<|endoftext|>", "tea"], name="a.jsonl")]
    assert preprocess_shards(files, Recipe(tokenizer=tokenizer_path), tmp_path / "out").end_inside == 1
    with pytest.raises(DataError, match="texts must not spell the end token"):
        preprocess_shards(files, Recipe(tokenizer=tokenizer_path, end_inside="fail"), tmp_path / "out")
