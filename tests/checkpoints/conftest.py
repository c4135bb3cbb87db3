"""Stores of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mirrored import finish, mirror, save


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, str]:
    """A run's folder, and where its mirror is."""
    (tmp_path / "store").mkdir()
    return tmp_path / "run", f"faulty://{tmp_path}/store"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A mirror with checkpoints of steps 3 and 6."""
    (tmp_path / "store").mkdir()
    address = f"file://{tmp_path}/store"
    with mirror(address, tmp_path / "first", keep=9) as sending:
        for step in (3, 6):
            sending.enqueue(save(tmp_path / "first", step))
            finish(sending)
    return address
