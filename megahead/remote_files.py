"""Files in an object store, or behind any other URL that fsspec knows: read, written and cached, each verified."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megahead.background import begin
from megahead.errors import FieldError, UserError
from megahead.files import InUseError, StagedFile, is_full
from megahead.wording import gib

# Addresses of remote files: what is one, and that none carries a secret.


_SCHEME = re.compile(r"([A-Za-z0-9]+::)*[A-Za-z][A-Za-z0-9+.-]*://")
_NAMES = "(?:key|token|secret|password|passwd|credential|signature|sig)"
_SECRET = re.compile(rf"://[^@]*:[^@]*@|\?|{_NAMES}=", re.IGNORECASE)
"""A password before a host (it may hold slashes), a query (signed addresses have one), a named secret."""


def is_remote(name: str) -> bool:
    """Whether `name` is a URL and not a path."""
    return _SCHEME.match(name) is not None


def trimmed(url: str) -> str:
    """Without slashes at its end, but for those of a root (`file:///`)."""
    return re.sub(r"(?<![:/])/+$", "", url)


def parted(url: str) -> tuple[str, str]:
    """The address of a file's folder, and its name there."""
    folder, _, name = url.rpartition("/")
    return f"{folder}/" if folder.endswith("/") else folder, name


def joined(url: str, *names: str) -> str:
    """The address of a file below `url`."""
    return "/".join([trimmed(url), *names])


def is_below(url: str, folder: str) -> bool:
    """Whether `url` is of something in the folder at another URL, or that folder itself."""
    return f"{_spelled(url)}/".startswith(f"{_spelled(folder)}/")


def _spelled(url: str) -> str:
    """The same for all ways to write the address of a place on a disk; other stores may take each for another place."""
    scheme, _, path = url.partition("://")
    if scheme.lower() in ("file", "local"):
        url = f"file://{posixpath.normpath(re.sub('/+', '/', path))}"
    return url.rstrip("/")


def refuse_secrets(field: str, name: str) -> None:
    """FieldError for a URL with a password, a key or a query; the sentence does not repeat it."""
    if is_remote(name) and _SECRET.search(name):
        hint = "give credentials by the environment, as the store's own tools read them"
        raise FieldError(field, "be an address without password, key or query", got="one that has some", hint=hint)


def without_secrets(text: str) -> str:
    """A text that may repeat what a user gave, without what `refuse_secrets` would refuse in it."""
    text = re.sub(r"://[^\s@'\"]*:[^\s@'\"]*@", "://***@", text)
    text = re.sub(r"(://[^\s'\"?]*)\?[^\s'\"]*", r"\1?***", text)
    return re.sub(rf"(://[^\s'\"]*?{_NAMES}=)[^\s'\"&;]*", r"\1***", text, flags=re.IGNORECASE)


# Errors of remote storage, each one sentence, in which no credentials are repeated.


_NAME_OF_SECRET = re.compile(r"key|secret|token|passw|credential|signature|sas", re.IGNORECASE)
_SHORTEST_SECRET = 6


class RemoteError(UserError):
    """A store that cannot be reached, does not answer, or refuses."""


class DamagedError(UserError):
    """A remote file that is missing, or not what was recorded of it."""


def told(error: BaseException) -> str:
    """The first line of what a store's package says, but for passwords and queries of addresses, and known secrets."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\?\S+", "?***", without_secrets(text))[:300].rstrip(".")


def _secrets() -> Iterator[str]:
    """What must not be repeated: of the environment, and of fsspec's settings."""
    import fsspec

    given: list[tuple[str, Any]] = [*os.environ.items()]
    given += [pair for section in fsspec.config.conf.values() if isinstance(section, dict) for pair in section.items()]
    for name, value in given:
        if isinstance(value, str) and len(value) >= _SHORTEST_SECRET and _NAME_OF_SECRET.search(name):
            yield value


# Opens a URL with fsspec, or says which package is missing.


_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")
"""Object stores, which have buckets and names: to make a folder there could make a bucket."""

_DISKS = ("file", "local")

_EXTRA = ("s3", "s3a")
"""What comes with `megahead[far]`."""


def open_url(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the URL's path in it; RemoteError if it has none."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    _refuse_unclear(url, scheme)
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise RemoteError(f"`{url}` needs a package that is missing ({told(error)}); {_install(scheme)}.") from None
    except ValueError as error:
        raise RemoteError(f"`{url}` must be of a kind that fsspec knows, but is not ({told(error)}).") from None
    except Exception as error:
        raise RemoteError(f"`{url}` must be an address that can be opened, but cannot ({told(error)}).") from None
    return files, root.rstrip("/")


def _refuse_unclear(url: str, scheme: str) -> None:
    """RemoteError for what is no address, or may mean another place than it seems to."""
    if not is_remote(url):
        raise RemoteError(f"`{url}` must be an address such as s3://BUCKET/FOLDER, but is a path.")
    if "::" in url:
        raise RemoteError(f"`{url}` must be one address, but is a chain of them (`::`); give the last one alone.")
    if scheme in _DISKS and not url.partition("://")[2].startswith("/"):
        raise RemoteError(
            f"`{url}` must have its whole path, but begins in the folder of each process; write {scheme}:///."
        )
    if not has_folders(url) and "//" in url.partition("://")[2]:  # what is written there is not found by listing it
        raise RemoteError(f"`{url}` must have single slashes, but has two that follow each other; leave one out.")


def has_folders(url: str) -> bool:
    """Whether the folder of a file must be made before the file is written."""
    return url.partition("://")[0].lower() not in _WITHOUT_FOLDERS


def is_disk(files: Any) -> bool:
    """Whether a file system of fsspec's is one of this machine, which renames."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(files, LocalFileSystem)


def _install(scheme: str) -> str:
    """A command; packages of fsspec's family must be of its own version, which `datasets` limits."""
    import fsspec
    from fsspec.registry import known_implementations

    if scheme in _EXTRA:
        return "pip install -e '.[far]'"
    module = known_implementations.get(scheme, {}).get("class", "").split(".")[0]
    if module == "gcsfs":
        return f"pip install 'gcsfs=={fsspec.__version__}'"
    return f"pip install {module}" if module and module != "fsspec" else "install it"


# A place in an object store, through fsspec: every call ends, with an answer or with one sentence.


T = TypeVar("T")

_print = partial(print, flush=True)

PATIENCE = 60.0
"""Seconds that a store may take for one block, or one small request, its package's own retries included."""

BLOCK = 1 << 24
"""Bytes of a request for a part of a file."""

MOST_PARTS = 9_000
"""In which a file is sent; S3 takes 10,000."""

TELL_SECONDS = 10.0
"""Between two lines on how far a download is."""

LANES = 4
"""Requests for parts of one file that are under way at once."""


class Store:
    """The files below `url`; their names are relative to it, with `/` between folders.

    FileNotFoundError for a file that is not there, RemoteError for anything else that goes wrong. Nothing is kept
    between two calls: what one of them reports is in the store then.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        """`patience`: seconds for a small request; parts of a file, of which is told while they are waited for, have
        PATIENCE."""
        refuse_secrets("URL", url)
        self.url, self.patience = trimmed(url), patience
        self._files, self._root = open_url(self.url)

    def sizes(self, folder: str) -> dict[str, int]:
        """All files below a folder, and the bytes of each; none for a folder that is not there."""
        try:
            found = self._asked(lambda: self._files.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        return {self._name(path): int(info["size"]) for path, info in found.items()}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return int(self._asked(lambda: self._files.info(self._path(name)))["size"])

    def version(self, name: str) -> str:
        """What is another when the file was replaced, as far as the store tells."""
        info = self._asked(lambda: self._files.info(self._path(name)))
        return hashlib.sha256(str(info).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """A small file."""
        return bytes(self._asked(lambda: self._files.cat_file(self._path(name))))

    def read_if_there(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Puts a small file there, and reads it back; RemoteError if it differs then."""
        self._make_folder(name)
        self._sent(partial(self._put_whole, self._path(name), content))
        if self.read_if_there(name) != content:
            raise RemoteError(
                f"`{self.url}/{name}` must read back as it was written, but does not; the store loses writes."
            )

    def _put_whole(self, path: str, content: bytes) -> None:
        """On disks under another name first: one that is full would leave neither what was there nor this. Not by
        `files.staged`: what goes wrong is the store's to tell."""
        if not is_disk(self._files):
            self._files.pipe_file(path, content)
            return
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/.{name}.partial"  # always the same: a killed session's is written over
        try:
            self._files.pipe_file(beside, content)
            with suppress(FileNotFoundError):  # lost, as reading it back tells
                Path(beside).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(beside).unlink()
            raise

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with suppress(FileNotFoundError):
            self._asked(lambda: self._files.rm_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, where the store has folders; one that is not empty, or not there, stays as it is."""
        if has_folders(self.url):
            with suppress(FileNotFoundError, RemoteError):
                self._asked(lambda: self._files.rmdir(self._path(name)))

    def put(self, path: Path, name: str) -> None:
        """Sends a file of any length, part by part; what arrived must still be checked. OSError if `path` cannot be
        read."""
        self._make_folder(name)
        part = max(BLOCK, -(-path.stat().st_size // MOST_PARTS))
        target = self._sent(lambda: self._files.open(self._path(name), "wb", block_size=part))
        try:
            with path.open("rb") as source:
                while block := source.read(part):
                    self._sent(partial(target.write, block))
            self._sent(target.close)
        except BaseException:
            begin(partial(_discard, target))
            raise

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a file, in order, several parts under way at once. Yields b"" each second while it
        waits."""
        ranges = iter([(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)])
        under_way = deque(self._begin(name, *each) for each in islice(ranges, LANES))
        while under_way:
            yield from self._until_done(under_way[0])
            yield self._result(under_way.popleft(), PATIENCE)
            under_way.extend(self._begin(name, *each) for each in islice(ranges, 1))

    def _make_folder(self, name: str) -> None:
        if has_folders(self.url):
            folder = self._path(name).rpartition("/")[0]
            self._sent(lambda: self._files.makedirs(folder, exist_ok=True))

    def _begin(self, name: str, start: int, end: int) -> Future[bytes]:
        return begin(lambda: bytes(self._files.cat_file(self._path(name), start=start, end=end)))

    def _until_done(self, future: Future[bytes]) -> Iterator[bytes]:
        deadline = time.monotonic() + PATIENCE
        while not future.done() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                future.exception(min(1.0, PATIENCE))
            if not future.done():
                yield b""

    def _asked(self, function: Callable[[], T]) -> T:
        future = begin(function)
        with suppress(TimeoutError):
            future.exception(self.patience)
        return self._result(future, self.patience)

    def _sent(self, function: Callable[[], T]) -> T:
        """Where what is not found is the place itself."""
        try:
            return self._asked(function)
        except FileNotFoundError as error:
            raise RemoteError(f"`{self.url}` must be a place that exists, but is none ({told(error)}).") from None

    def _result(self, future: Future[T], waited: float) -> T:
        if not future.done():
            raise RemoteError(f"`{self.url}` must answer, but has not for {waited:g} s; check the network.")
        error = future.exception()
        if isinstance(error, FileNotFoundError):
            raise error
        if error is not None and is_full(error):
            raise RemoteError(f"`{self.url}` must have room, but has none ({told(error)}); free some there.") from None
        if error is not None:
            raise RemoteError(
                f"`{self.url}` must be reachable, but is not ({told(error)}); check the address, the network, and the "
                "credentials in the environment."
            ) from None
        return future.result()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


def _discard(target: Any) -> None:
    """Gives a file up that is half sent; whatever becomes of that, nothing refers to it."""
    with suppress(Exception):
        target.discard()


# Receives a remote file, and checks it on the way.


@dataclass(frozen=True)
class Expected:
    """What is known of a file before it is read."""

    bytes: int

    sha256: str | None = None
    """None where nobody recorded one: then the length alone is checked."""


def receive(store: Store, name: str, expected: Expected, write: Callable[[bytes], object]) -> Iterator[int]:
    """Hands all of a remote file to `write`, and yields how many bytes came so far, also (at least once a second) while
    it waits. DamagedError if the file is missing, or not what was expected; what was written then is worthless."""
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


def download_to(
    write: Callable[[bytes], object], store: Store, name: str, expected: Expected, say: Callable[[str], None] = _print
) -> Iterator[None]:
    """As `receive`; every TELL_SECONDS a line says how much there is."""
    reported = time.monotonic()
    for received in receive(store, name, expected, write):
        if time.monotonic() - reported > TELL_SECONDS:
            reported = time.monotonic()
            say(f"fetching {store.url}/{name}: {gib(received)} of {gib(expected.bytes)}")
        yield


def _check_length(store: Store, name: str, length: int) -> None:
    try:
        size = store.size(name)
    except FileNotFoundError:
        raise DamagedError(f"`{store.url}/{name}` must exist, but is missing.") from None
    if size != length:
        raise DamagedError(f"`{store.url}/{name}` must have {length} bytes, but has {size} instead.")


# Remote files on this machine's disk: fetched by one process of it, named once checked, kept for the next run.
#
# They lie in `~/.cache/megahead` (`$XDG_CACHE_HOME/megahead`), in a folder for each version of what they are copies
# of: what is replaced in the store is fetched anew, and the old one stays until somebody removes it.


_LOOK_SECONDS = 0.1
"""Between two looks at what another process fetches."""


def folder_for(*identity: str) -> Path:
    """Where copies of one version of something belong."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "megahead" / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:20]


def local_file(name: str) -> str:
    """A path of the file that `name` means: itself, or a copy of what is at that URL; RemoteError if there is none."""
    if not is_remote(name):
        return name
    url, file = parted(name)
    store = Store(url)
    try:
        expected, folder = Expected(store.size(file)), folder_for(name, store.version(file))
    except FileNotFoundError:
        raise RemoteError(f"`{name}` must exist, but does not; check the address.") from None
    for _ in fetch_into(folder, store, {file: expected}):
        pass
    return str(folder / file)


def fetch_into(
    folder: Path, store: Store, files: Mapping[str, Expected], say: Callable[[str], None] = _print
) -> Iterator[None]:
    """Fetches what is not in `folder` yet, and yields at least once a second meanwhile.

    Of the processes of a machine one fetches a file, and the others wait for it. RemoteError, also for the one that is
    waited for and no longer gets anywhere; DamagedError for a file that is not what was expected; WriteError for a full
    disk.
    """
    for name, expected in files.items():
        yield from _fetch(folder / name, store, name, expected, say)


def _fetch(target: Path, store: Store, name: str, expected: Expected, say: Callable[[str], None]) -> Iterator[None]:
    staged = yield from _turn(target)
    if staged is None:
        return
    try:
        yield from download_to(staged.write, store, name, expected, say)
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
                raise RemoteError(
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
