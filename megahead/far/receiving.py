"""Receives a far file, and checks it on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megahead.far.errors import DamagedError
from megahead.far.store import Store


@dataclass(frozen=True)
class Expected:
    """What is known of a file before it is read."""

    bytes: int

    sha256: str | None = None
    """None where nobody recorded one: then the length alone is checked."""


def receive(store: Store, name: str, expected: Expected, write: Callable[[bytes], object]) -> Iterator[int]:
    """Hands all of a far file to `write`, and yields how many bytes came so far, also (at least once a second) while it
    waits. DamagedError if the file is missing, or not what was expected; what was written then is worthless."""
    received, digest = 0, hashlib.sha256()
    _check_length(store, name, expected.bytes)
    try:
        for block in store.blocks(name, expected.bytes):
            write(block)
            digest.update(block)
            received += len(block)
            yield received
    except FileNotFoundError:
        raise DamagedError(f"`{store.url}/{name}` must exist, but was removed meanwhile.") from None
    if received != expected.bytes or (expected.sha256 is not None and digest.hexdigest() != expected.sha256):
        raise DamagedError(f"`{store.url}/{name}` must match its checksum, but does not; it was damaged.")


def _check_length(store: Store, name: str, length: int) -> None:
    try:
        size = store.size(name)
    except FileNotFoundError:
        raise DamagedError(f"`{store.url}/{name}` must exist, but is missing.") from None
    if size != length:
        raise DamagedError(f"`{store.url}/{name}` must have {length} bytes, but has {size} instead.")
