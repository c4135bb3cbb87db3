"""The short form of `kill_and_resume.py`: a run killed again and again ends as one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs.kill_and_resume import torture


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_kills_at_random_moments_leave_no_trace(tmp_path: Path, background: bool) -> None:
    assert torture(tmp_path, kills=3, seed=1, background=background).kills == 3
