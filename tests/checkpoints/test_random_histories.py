"""Random histories of two disks and a store; `random_histories.py` has as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.random_histories import torture

from support.long import long


@pytest.mark.parametrize(("count", "seed"), [(20, 0), long(1500, 1000)])
def test_no_random_history_loses_or_mixes_checkpoints(tmp_path: Path, count: int, seed: int) -> None:
    assert torture(tmp_path, count, seed) > 5 * count
