"""Random histories of two disks and a store; `random_histories.py` has more of them."""

from __future__ import annotations

from pathlib import Path

from checkpoints.random_histories import torture


def test_no_random_history_loses_or_mixes_checkpoints(tmp_path: Path) -> None:
    assert torture(tmp_path, count=40, seed=0) > 200
