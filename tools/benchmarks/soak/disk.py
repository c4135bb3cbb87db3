"""The disk that all nodes share: a small file system in a file, so that it can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megahead.errors import UserError
from megahead.files import staged

BYTES = 1 << 29
_LEFT = 1 << 16


@dataclass(frozen=True)
class Disk:
    """Mounted at `place`."""

    place: Path

    def fill(self) -> None:
        fill(self.place)

    def empty(self) -> None:
        empty(self.place)


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    """What is on it stays in `folder`/disk.img."""
    image, place = folder / "disk.img", folder / "disk"
    place.mkdir(exist_ok=True)
    if place.is_mount():  # a sitting before was killed
        _call("umount", "-l", place)
    if not image.exists():
        with staged(image) as partial:
            with partial.open("xb") as file:
                os.truncate(file.fileno(), BYTES)
            _call("mkfs.ext4", "-q", "-m", "0", partial)
    _call("mount", "-o", "loop", image, place)
    try:
        yield Disk(place)
    finally:
        _call("umount", "-l", place)


def fill(folder: Path) -> None:
    """Takes all but some bytes of the file system that it lies in."""
    with suppress(OSError), (folder / "ballast").open("xb") as file:
        there = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, max(1, there.f_bavail * there.f_frsize - _LEFT))


def empty(folder: Path) -> None:
    with suppress(OSError):
        (folder / "ballast").unlink()


def _call(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`{' '.join(map(str, command))}` must work, but does not ({done.stderr.strip()}).")
