"""A sitting that was killed leaves nothing that keeps the next one from its first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import cluster, disk
from benchmarks.soak.disk import Disk


class Host:
    """One without a namespace."""

    name = address = "here"

    def kill(self) -> None:
        pass


@contextmanager
def in_place(folder: Path) -> Iterator[Disk]:
    (folder / "disk").mkdir(exist_ok=True)
    yield Disk(folder / "disk")


@contextmanager
def nowhere(count: int) -> Iterator[Any]:
    yield [Host() for _ in range(count)], None


def test_clocks_bits_and_disk_are_put_right_when_another_sitting_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in {"mounted": in_place, "hosts": nowhere, "may_make_hosts": lambda: True}.items():
        monkeypatch.setattr(cluster, name, instead)
    for name in ("disk/ballast", "node-0/flip", "node-1/ahead"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("24")
    with cluster.cluster(tmp_path, [], 2, "1:2", 0.0, lambda: False):
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "elastic.sh"]


def test_a_disk_is_there_once_it_has_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "_call", killed)
    with pytest.raises(KeyboardInterrupt), disk.mounted(tmp_path):
        pass
    assert not (tmp_path / "disk.img").exists()
