"""Far files on this machine's disk: fetched by one process of it, named when they were checked, kept for the next run.

They lie in `~/.cache/megahead` (`$XDG_CACHE_HOME/megahead`), in a folder for each version of what they are copies of:
what is replaced in the store is fetched anew, and the old one stays until somebody removes it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megahead.far.address import is_far, parted
from megahead.far.errors import FarError
from megahead.far.receiving import Expected, receive
from megahead.far.store import PATIENCE, Store
from megahead.files import InUseError, StagedFile
from megahead.wording import gib

TELL_SECONDS = 10.0
"""Between two lines on how far it is."""

_LOOK_SECONDS = 0.1
"""Between two looks at what another process fetches."""


def folder_for(*identity: str) -> Path:
    """Where copies of one version of something belong."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "megahead" / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:20]


def near_file(name: str) -> str:
    """A path of the file that `name` means: itself, or a copy of what is at that URL; FarError if there is none."""
    if not is_far(name):
        return name
    url, file = parted(name)
    store = Store(url)
    try:
        expected, folder = Expected(store.size(file)), folder_for(name, store.version(file))
    except FileNotFoundError:
        raise FarError(f"`{name}` must exist, but does not; check the address.") from None
    for _ in fetch_into(folder, store, {file: expected}):
        pass
    return str(folder / file)


def fetch_into(
    folder: Path, store: Store, files: Mapping[str, Expected], say: Callable[[str], None] = print
) -> Iterator[None]:
    """Fetches what is not in `folder` yet, and yields at least once a second meanwhile.

    Of the processes of a machine one fetches a file, and the others wait for it. FarError, also for the one that is
    waited for and no longer gets anywhere; DamagedError for a file that is not what was expected; WriteError for a full
    disk.
    """
    for name, expected in files.items():
        yield from _fetch(folder / name, store, name, expected, say)


def _fetch(target: Path, store: Store, name: str, expected: Expected, say: Callable[[str], None]) -> Iterator[None]:
    staged = yield from _turn(target)
    if staged is None:
        return
    told = time.monotonic()
    try:
        for received in receive(store, name, expected, staged.write):
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                say(f"fetching {store.url}/{name}: {gib(received)} of {gib(expected.bytes)}")
            yield
        staged.sync()
        staged.publish()
    finally:
        staged.discard()


def _turn(target: Path) -> Generator[None, None, StagedFile | None]:
    """Returns the file to be written, or None once it is there, fetched by another process."""
    seen, since = -1, time.monotonic()
    while not target.exists():
        try:
            staged = StagedFile(target)
        except InUseError:
            size = _size(target.with_name(f"{target.name}.partial"))
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > 2 * PATIENCE:
                raise FarError(
                    f"`{target}` must be fetched by one process, but the one that does has received nothing for "
                    f"{2 * PATIENCE:g} s; end it."
                ) from None
            time.sleep(_LOOK_SECONDS)
            yield
        else:
            if not target.exists():
                return staged
            staged.discard()
    return None


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return -1
