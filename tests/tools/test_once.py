"""Steps that run once: reused when nothing has changed, done again when something has."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from steps.once import StepRunner
from support.forked import FORK


class Copying:
    """A step that copies `source` to `target` and counts how often it did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.target, self.times = folder, folder / "source", folder / "target", 0
        self.source.write_text("text")
        self.output = io.StringIO()

    def run(self, **changed: Any) -> bool:
        """Runs the step, as a second command would; whether it was reused."""
        once = StepRunner(self.folder / "records", Console(file=self.output))
        options = {"settings": {"seed": 1}, "inputs": [self.source], "outputs": [self.target], **changed}
        return once.run("copy", self._work, **options).reused

    def _work(self) -> str:
        self.times += 1
        self.target.write_bytes(self.source.read_bytes())
        return "1 file [new]"


@pytest.fixture
def copying(tmp_path: Path) -> Copying:
    return Copying(tmp_path)


def test_a_finished_step_is_reused_and_says_so(copying: Copying) -> None:
    assert [copying.run(), copying.run()] == [False, True]
    assert copying.times == 1
    assert copying.output.getvalue().splitlines() == [
        "▸ copy",
        "✓ copy done (0s): 1 file [new]",
        "✓ copy reused (0s): 1 file [new]",
    ]


def test_a_console_without_markup_is_printed_to_as_well(tmp_path: Path) -> None:
    output = io.StringIO()
    StepRunner(tmp_path, Console(file=output, markup=False)).run("step", lambda: "[done]")
    assert output.getvalue().splitlines() == ["▸ step", "✓ step done (0s): [done]"]


@pytest.mark.parametrize(
    "change",
    [
        lambda copying: copying.source.write_text("longer text"),
        lambda copying: os.utime(copying.source, (1, 1)),
        lambda copying: copying.target.unlink(),
        lambda copying: copying.target.write_text("damaged"),
        lambda copying: Path(copying.folder, "records", "copy.json").write_text('{"key'),
    ],
    ids=["input content", "input time", "output gone", "output changed", "record broken"],
)
def test_it_runs_again_after_a_file_changed(copying: Copying, change: Callable[[Copying], None]) -> None:
    copying.run()
    change(copying)
    assert not copying.run()
    assert copying.target.read_bytes() == copying.source.read_bytes()


def test_it_runs_again_after_its_settings_changed(copying: Copying) -> None:
    copying.run()
    assert not copying.run(settings={"seed": 2})


def test_a_changed_file_inside_an_input_folder_counts(copying: Copying) -> None:
    folder = copying.folder / "inputs"
    folder.mkdir()
    copying.run(inputs=[folder])
    assert copying.run(inputs=[folder])
    Path(folder, "new").write_text("")
    assert not copying.run(inputs=[folder])


def test_a_step_that_fails_is_not_taken_for_finished(copying: Copying) -> None:
    copying.run()
    copying.source.unlink()
    with pytest.raises(FileNotFoundError):
        copying.run()
    assert not Path(copying.folder, "records", "copy.json").exists()


def test_a_step_that_was_killed_runs_again(copying: Copying) -> None:
    copying.run()
    killed = FORK.Process(target=_killed_in_its_work, args=(copying,))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert not copying.run()
    assert copying.run()


def _killed_in_its_work(copying: Copying) -> None:
    copying._work = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    copying.run(settings={"seed": 2})


def test_what_has_moved_with_its_records_is_still_finished(copying: Copying, tmp_path: Path) -> None:
    copying.run()
    for name in ("source", "target", "records"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    copying.folder = tmp_path / "elsewhere"
    copying.source, copying.target = copying.folder / "source", copying.folder / "target"
    assert copying.run()


def test_one_process_waits_while_another_runs_the_same_step(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        begun, done = threading.Event(), threading.Event()

        def slow() -> str:
            begun.set()
            assert done.wait(60)
            return "slow"

        first = pool.submit(StepRunner(tmp_path, Console(quiet=True)).run, "step", slow)
        assert begun.wait(60)
        second = pool.submit(StepRunner(tmp_path, Console(quiet=True)).run, "step", lambda: "fast")
        with pytest.raises(TimeoutError):  # without a lock it would be done by then
            second.result(0.2)
        done.set()
        assert (first.result(60).result, second.result(60).result) == ("slow", "slow")
