"""Exporting and comparing never hold the model: the peak above the interpreter's own stays far below its size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.forked import run_script

SCRIPT = Path(__file__).with_name("export_memory.py")


@pytest.mark.long
def test_the_peak_is_that_of_the_largest_tensors(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), str(tmp_path), *arguments]
        folders = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2])]
        code = f"import runpy, sys; sys.path[:0] = {folders}; sys.argv = {command[1:]}; "
        done = subprocess.run(
            [sys.executable, "-c", code + f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    saved = run_script(SCRIPT, tmp_path, "save", 8, 512, 4000)
    assert saved.returncode == 0, saved.stderr
    peak, model = map(float, run("measure").split())
    assert model > 110
    assert peak < 60
