"""The demo's stages: finished work is reused, and never after something it depends on has changed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from demo_pipeline.stages import Stages, duration


class Copying:
    """A stage that copies `source` to `target` and counts how often it did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.target, self.times = folder, folder / "source", folder / "target", 0
        self.source.write_text("text")
        self.output = io.StringIO()

    def run(self, **changed: Any) -> bool:
        """Runs the stage in a new runner, as a second command would; whether it was reused."""
        stages = Stages(self.folder / "stamps", Console(file=self.output))
        options = {"settings": {"seed": 1}, "inputs": [self.source], "outputs": [self.target], **changed}
        return stages.run("copy", self._work, **options).reused

    def _work(self) -> str:
        self.times += 1
        self.target.write_bytes(self.source.read_bytes())
        return "1 file [new]"


@pytest.fixture
def copying(tmp_path: Path) -> Copying:
    return Copying(tmp_path)


def test_a_finished_stage_is_reused_and_says_so(copying: Copying) -> None:
    assert [copying.run(), copying.run()] == [False, True]
    assert copying.times == 1
    assert copying.output.getvalue().splitlines() == [
        "▸ copy",
        "✓ copy done (0.0 s): 1 file [new]",
        "✓ copy reused (0.0 s): 1 file [new]",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda copying: copying.source.write_text("longer text"),
        lambda copying: os.utime(copying.source, (1, 1)),
        lambda copying: copying.target.unlink(),
        lambda copying: copying.target.write_text("damaged"),
        lambda copying: Path(copying.folder, "stamps", "copy.json").write_text('{"key'),
    ],
    ids=["input content", "input time", "output gone", "output changed", "stamp broken"],
)
def test_it_runs_again_after_a_file_changed(copying: Copying, change: Callable[[Copying], None]) -> None:
    copying.run()
    change(copying)
    assert not copying.run()
    assert copying.target.read_bytes() == copying.source.read_bytes()


@pytest.mark.parametrize("changed", [{"settings": {"seed": 2}}, {"version": 2}], ids=["settings", "version"])
def test_it_runs_again_after_its_definition_changed(copying: Copying, changed: dict[str, Any]) -> None:
    copying.run()
    assert not copying.run(**changed)


def test_a_changed_file_inside_an_input_folder_counts(copying: Copying) -> None:
    folder = copying.folder / "inputs"
    folder.mkdir()
    copying.run(inputs=[folder])
    assert copying.run(inputs=[folder])
    Path(folder, "new").write_text("")
    assert not copying.run(inputs=[folder])


def test_a_stage_that_fails_is_not_taken_for_finished(copying: Copying) -> None:
    copying.run()
    copying.source.unlink()
    with pytest.raises(FileNotFoundError):
        copying.run()
    assert not Path(copying.folder, "stamps", "copy.json").exists()


def test_the_table_adds_up_what_this_run_did(copying: Copying) -> None:
    console = Console(file=io.StringIO(), width=80)
    stages = Stages(copying.folder, console)
    stages.run("first", lambda: "one")
    Stages(copying.folder, console).run("second", lambda: "two")
    stages.run("second", lambda: "never")
    console.print(stages.table())
    table = console.file.getvalue().splitlines()[-4:]
    assert [line.split() for line in table] == [
        ["stage", "time", "result"],
        ["first", "0.0", "s", "one"],
        ["second", "reused", "two"],
        ["this", "run", "0.0", "s"],
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (187, "3 min 07 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
