"""Datasets named by a URL: their files are fetched to this machine, and then mapped like any other."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from megahead.corpus.dataset_info import DatasetInfo
from megahead.errors import DataError
from megahead.far import Expected, Store, fetch_into, folder_for, is_far, parted
from megahead.files import write_atomically

_TOKENS, _INDEX, _INFO = ".bin", ".idx", ".json"


def near_dataset(prefix: str | Path) -> Path:
    """The prefix of a dataset's files on this machine: `prefix`, or where those at that URL were fetched to."""
    fetching = fetch_dataset(str(prefix))
    while True:
        try:
            next(fetching)
        except StopIteration as ended:
            return Path(ended.value)


def fetch_dataset(prefix: str) -> Generator[None, None, str]:
    """Fetches what is not here yet, yields at least once a second meanwhile, and returns the prefix here.

    Checked by the lengths and checksums in `PREFIX.json`; without that file by the lengths in the store alone.
    DataError for a dataset that is not there, FarError for a store that cannot be read, DamagedError for files that do
    not agree.
    """
    if not is_far(prefix):
        return prefix
    url, name = parted(prefix)
    store = Store(url)
    info = store.read_if_there(f"{name}{_INFO}")
    try:
        identity = [store.version(f"{name}{ending}") for ending in (_TOKENS, _INDEX)] if info is None else [info.hex()]
        folder = folder_for(prefix, *identity)
        files = _by_length(store, name) if info is None else _by_checksum(folder, name, info)
    except FileNotFoundError:
        raise DataError(
            f"`{prefix}` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."
        ) from None
    yield from fetch_into(folder, store, files)
    return str(folder / name)


def _by_length(store: Store, name: str) -> dict[str, Expected]:
    return {f"{name}{ending}": Expected(store.size(f"{name}{ending}")) for ending in (_TOKENS, _INDEX)}


def _by_checksum(folder: Path, name: str, text: bytes) -> dict[str, Expected]:
    path = folder / f"{name}{_INFO}"
    if not path.exists():
        write_atomically(path, text)
    info = DatasetInfo.load(path)
    return {
        f"{name}{_TOKENS}": Expected(info.bin.bytes, info.bin.sha256),
        f"{name}{_INDEX}": Expected(info.idx.bytes, info.idx.sha256),
    }
