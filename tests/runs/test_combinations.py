"""The short form of `combinations.py`: settings that nobody combined are refused, or keep what every run promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs.combinations import combine

from support.long import long


@pytest.mark.parametrize(("count", "seed"), [(2, 1), long(40, 2)])
def test_combined_settings_keep_what_every_run_promises(tmp_path: Path, count: int, seed: int) -> None:
    assert combine(tmp_path, count, seed)["sound"] >= count // 2
