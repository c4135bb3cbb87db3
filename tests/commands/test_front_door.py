"""`megahead COMMAND`: every command is listed and found, a mistyped one is answered with the nearest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megahead
from megahead.__main__ import dispatch, resolve_command, usage
from megahead.commands import COMMANDS
from megahead.errors import UserError

ROOT = Path(__file__).parents[2]
NAMES = [name for commands in COMMANDS.values() for name in commands]


def test_every_command_is_a_module_and_every_module_a_command() -> None:
    folder = Path(megahead.__file__).with_name("commands")
    assert sorted(NAMES) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_a_script_of_a_checkout_too(name: str) -> None:
    content = (ROOT / ("launch" if name == "pretrain" else "tools") / f"{name}.py").read_text()
    assert f'script(__name__, "{name}")' in content or f"from megahead.commands.{name} import main" in content


def test_the_list_has_every_command_under_its_group() -> None:
    groups = usage().split("\n\n")[1:]
    assert [group.splitlines()[0] for group in groups] == list(COMMANDS)
    for group, commands in zip(groups, COMMANDS.values(), strict=True):
        listed = [line.split(maxsplit=1) for line in group.splitlines()[1:]]
        assert [(name.replace("-", "_"), sentence) for name, sentence in listed] == list(commands.items())
    assert max(map(len, usage().splitlines())) <= 80


@pytest.mark.parametrize("word", ["train-tokenizer", "train_tokenizer"])
def test_dashes_and_underscores_name_the_same(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/megahead", word])
    with pytest.raises(SystemExit) as stopped:
        dispatch()
    said = capsys.readouterr().err
    assert (stopped.value.code, said.startswith("usage: megahead train-tokenizer [-h]")) == (2, True)
    assert "\nmegahead train-tokenizer: error: the following arguments are required: --output\n" in said


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("preproces", "did you mean `preprocess`?"),
        ("tokenizer", "did you mean `train-tokenizer`?"),
        ("finetuning", "did you mean `finetune`?"),
        ("eval", "did you mean `eval-harness`?"),
        ("xyzzy", "`megahead --help` lists them."),
        ("-x", "`megahead --help` lists them."),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(word: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        resolve_command(word)
    assert str(raised.value) == f"`megahead` must be given the name of a command, but `{word}` is none; {fix}"


@pytest.mark.parametrize(
    ("words", "code", "begins"),
    [(["--version"], 0, f"megahead {megahead.__version__}\n"), ([], 2, "usage: megahead"), (["-h"], 0, "usage: ")],
)
def test_without_a_command(
    words: list[str], code: int, begins: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["megahead", *words])
    assert dispatch() == code
    assert capsys.readouterr().out.startswith(begins)


def test_the_list_is_told_by_python_alone(tmp_path: Path) -> None:
    """Neither numpy nor pydantic nor rich: without any installed package."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "megahead"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (2, usage() + "\n"), done.stderr
