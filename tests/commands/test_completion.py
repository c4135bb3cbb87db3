"""Tab completes commands and their options where argcomplete is installed, and costs nothing where nobody asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megahead.__main__ import command_names
from support.commands import ROOT


def asked(line: str, folder: Path, *options: str) -> tuple[int, list[str]]:
    """What `megahead` answers to a Tab behind `line`, as the shell calls it: its exit code, and the words."""
    answer = folder / "answer"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
    }
    command = [sys.executable, *options, "-m", "megahead"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert (done.stdout, done.stderr) == ("", "")
    return done.returncode, answer.read_text().split() if answer.exists() else []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megahead pre", ["preprocess", "pretrain"]),
        ("megahead train-tokenizer --vocab", ["--vocab-size"]),
        ("megahead convert ", ["-h", "--help", "to-hf", "from-hf", "items", "revocabulary"]),
        ("megahead convert to-hf --head ", ["none", "tied", "pmi", "trained"]),
        ("megahead convert to-hf --checkpoint s3://nowhere/step-1 --dt", ["--dtype"]),  # not fetched
        ("megahead pretrain --wor", ["--world-size"]),  # it would end by os._exit after an error
        ("megahead eval_harness --mod", ["--model"]),
        ("megahead generate --model missing --inter", ["--interactive"]),
    ],
)
def test_the_shell_is_answered(line: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert asked(line, tmp_path) == (0, words)


def test_what_was_typed_is_neither_looked_for_nor_fetched(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    program = (
        "import argparse; from megahead.__main__ import patch_argparse; patch_argparse();"
        "parser = argparse.ArgumentParser(); parser.add_argument('--model', type=lambda text: 1 / 0);"
        "assert parser.parse_known_args(['--model', 's3://far'])[0].model == 's3://far'"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )


def test_every_command_is_offered(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    code, words = asked("megahead ", tmp_path)
    assert (code, words) == (0, ["-h", "--help", "--version", *(name.replace("_", "-") for name in command_names())])


def test_there_is_no_answer_to_an_unknown_command_or_without_argcomplete(tmp_path: Path) -> None:
    assert asked("megahead nonsense --", tmp_path) == (1, [])
    assert asked("megahead ge", tmp_path, "-S") == (1, [])


def test_nothing_of_it_is_imported_where_no_shell_asks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megahead", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "megahead.commands" in imported
    assert not imported & {"argcomplete", "argparse"}
