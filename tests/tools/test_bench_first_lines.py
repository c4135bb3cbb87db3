"""The table of first lines has each command, and times one until its line."""

from __future__ import annotations

from pathlib import Path

from bench_first_lines import commands, time_first_line

from megahead.commands import COMMANDS


def test_each_command_is_in_the_table_and_one_is_stopped_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "outputs").mkdir()
    names = {command[0] for command in commands(tmp_path, tmp_path / "outputs")}
    assert names == {name.replace("_", "-") for group in COMMANDS.values() for name in group}
    cpu_seconds, seconds, line = time_first_line(["doctor"])
    assert 0 < cpu_seconds < 2
    assert seconds > 0
    assert line == "loading torch"
