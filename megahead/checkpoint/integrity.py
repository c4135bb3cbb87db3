"""Verifies files against the checksums in their manifest, divided among ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from megahead.checkpoint.manifest import FileEntry
from megahead.distributed import Group
from megahead.errors import CheckpointError

_BLOCK = 1 << 20
"""Bytes read at a time, into one buffer."""


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[None]:
    """Reads all of `files`, at about 1 GB per second, and yields after each block; CheckpointError for the first
    damaged file."""
    for name, entry in files.items():
        yield from _check(folder / name, entry.sha256)


def _check(path: Path, sha256: str) -> Iterator[None]:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(block):
                digest.update(block[:size])
                yield
    except OSError as error:
        raise CheckpointError(f"`{path}` must be readable, but is not ({error.strerror}).") from None
    if digest.hexdigest() != sha256:
        raise CheckpointError(
            f"`{path}` must match its checksum, but does not; it was damaged, use another checkpoint."
        )


def share_of(files: Mapping[str, FileEntry], group: Group) -> dict[str, FileEntry]:
    """This rank's share of `files`: the largest first, each to the rank with the fewest bytes so far."""
    loads = [0] * group.size
    mine = {}
    for name, entry in sorted(files.items(), key=lambda item: item[1].bytes, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += entry.bytes
        if rank == group.rank:
            mine[name] = entry
    return mine
