"""The short form of `fuzzing.py`: what is wrong with a config or a file ends in a sentence, or does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs.fuzzing import fuzz_configs, fuzz_files


@pytest.mark.parametrize("fuzz", [fuzz_configs, fuzz_files])
def test_no_traceback_no_hang_and_nothing_written_elsewhere(tmp_path: Path, fuzz: object) -> None:
    endings = fuzz(tmp_path / "fuzz", count=15, seed=4)  # type: ignore[operator]
    assert endings["failed"] == 0
    assert endings["refused"] > 0
    assert endings["sound"] > 0
