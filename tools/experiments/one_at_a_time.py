"""Several commands of experiments may share a folder: what two of them need, one makes while the other waits."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(output: Path) -> Iterator[None]:
    """Waits until no other process makes `output`, at the longest until that process ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
