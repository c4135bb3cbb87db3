"""Reads, writes, verifies and caches files in an object store, or at any other fsspec URL."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megahead.background import submit
from megahead.errors import FieldError, UserError
from megahead.files import AtomicFile, InUseError, is_full
from megahead.wording import format_gib, print_line

# URLs of remote files, which must not contain secrets.


_SCHEME = re.compile(r"([A-Za-z0-9]+::)*[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET_NAMES = "(?:key|token|secret|password|passwd|credential|signature|sig)"
_SECRET_IN_URL = re.compile(rf"://[^@]*:[^@]*@|\?|{_SECRET_NAMES}=", re.IGNORECASE)
"""Matches a password (it may contain slashes), a query (as in presigned URLs) or a named secret."""


def is_remote(name: str) -> bool:
    """Whether `name` is a URL and not a path."""
    return _SCHEME.match(name) is not None


def strip_slashes(url: str) -> str:
    """The URL without trailing slashes, except for a root (`file:///`)."""
    return re.sub(r"(?<![:/])/+$", "", url)


def split_url(url: str) -> tuple[str, str]:
    """The URL of a file's folder, and the file's name."""
    folder, _, name = url.rpartition("/")
    return f"{folder}/" if folder.endswith("/") else folder, name


def join_url(url: str, *names: str) -> str:
    """The URL of a file below `url`."""
    return "/".join([strip_slashes(url), *names])


def is_below(url: str, folder: str) -> bool:
    """Whether `url` is the URL `folder`, or below it."""
    return f"{_normalized(url)}/".startswith(f"{_normalized(folder)}/")


def _normalized(url: str) -> str:
    """Canonical form of a local URL; other stores may treat every spelling as another path."""
    scheme, _, path = url.partition("://")
    if scheme.lower() in ("file", "local"):
        url = f"file://{posixpath.normpath(re.sub('/+', '/', path))}"
    return url.rstrip("/")


def refuse_secrets(field: str, name: str) -> None:
    """FieldError for a URL with a password, a key or a query; the error does not contain it."""
    if is_remote(name) and _SECRET_IN_URL.search(name):
        hint = "give credentials by the environment, as the store's own tools read them"
        raise FieldError(field, "be an address without password, key or query", got="one that has some", hint=hint)


def redact_secrets(text: str) -> str:
    """A text in which everything that `refuse_secrets` rejects is redacted."""
    text = re.sub(r"://[^\s@'\"]*:[^\s@'\"]*@", "://***@", text)
    text = re.sub(r"(://[^\s'\"?]*)\?[^\s'\"]*", r"\1?***", text)
    return re.sub(rf"(://[^\s'\"]*?{_SECRET_NAMES}=)[^\s'\"&;]*", r"\1***", text, flags=re.IGNORECASE)


_SECRET_VARIABLE = re.compile(r"key|secret|token|passw|credential|signature|sas", re.IGNORECASE)
_MIN_SECRET_LENGTH = 6


class RemoteError(UserError):
    """A store that cannot be reached, does not answer, or refuses."""


class DamagedError(UserError):
    """A remote file that is missing, or differs from its recorded size or checksum."""


def error_summary(error: BaseException) -> str:
    """The first line of an fsspec error, with passwords, queries and known secrets redacted."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\?\S+", "?***", redact_secrets(text))[:300].rstrip(".")


def _secrets() -> Iterator[str]:
    """Secrets in the environment and in fsspec's configuration."""
    import fsspec

    variables: list[tuple[str, Any]] = [*os.environ.items()]
    variables += [
        pair for section in fsspec.config.conf.values() if isinstance(section, dict) for pair in section.items()
    ]
    for name, value in variables:
        if isinstance(value, str) and len(value) >= _MIN_SECRET_LENGTH and _SECRET_VARIABLE.search(name):
            yield value


_SCHEMES_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")
"""Object stores without folders: creating a folder could create a bucket."""

_LOCAL_SCHEMES = ("file", "local")


def open_url(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it; RemoteError if there is none."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    _validate_url(url, scheme)
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except Exception as error:
        summary = error_summary(error)
        sentence = f"must be an address that can be opened, but cannot ({summary})"
        if isinstance(error, ImportError):
            sentence = f"needs a package that is missing ({summary}); {_install_hint(scheme)}"
        elif isinstance(error, ValueError):
            sentence = f"must be of a kind that fsspec knows, but is not ({summary})"
        raise RemoteError(f"`{url}` {sentence}.") from None
    return files, root.rstrip("/")


def _validate_url(url: str, scheme: str) -> None:
    """RemoteError for an invalid or ambiguous URL."""
    if not is_remote(url):
        raise RemoteError(f"`{url}` must be an address such as s3://BUCKET/FOLDER, but is a path.")
    if "::" in url:
        raise RemoteError(f"`{url}` must be one address, but is a chain of them (`::`); give the last one alone.")
    if scheme in _LOCAL_SCHEMES and not url.partition("://")[2].startswith("/"):
        raise RemoteError(f"`{url}` must be an absolute path, but is relative; write {scheme}:///.")
    if not has_folders(url) and "//" in url.partition("://")[2]:  # a listing would not contain such files
        raise RemoteError(f"`{url}` must have single slashes, but has two that follow each other; leave one out.")


def has_folders(url: str) -> bool:
    """Whether a file's folder must be created before the file is written."""
    return url.partition("://")[0].lower() not in _SCHEMES_WITHOUT_FOLDERS


def _install_hint(scheme: str) -> str:
    """The install command. gcsfs must match fsspec, which `datasets` pins."""
    import fsspec
    from fsspec.registry import known_implementations

    if scheme in ("s3", "s3a"):
        return "pip install -e '.[remote]'"
    module = known_implementations.get(scheme, {}).get("class", "").split(".")[0]
    if module == "gcsfs":
        return f"pip install 'gcsfs=={fsspec.__version__}'"
    return f"pip install {module}" if module and module != "fsspec" else "install it"


T = TypeVar("T")

TIMEOUT_SECONDS = 60.0
"""For one block or one small request, including the retries of the store's package."""

BLOCK = 1 << 24
"""Bytes of a range request."""

MAX_PARTS = 9_000
"""Limit of a multipart upload; S3 allows 10,000."""

PROGRESS_SECONDS = 10.0
"""Interval of progress lines of a download."""

PARALLEL_REQUESTS = 4
"""Concurrent range requests for one file."""


class Store:
    """The files below `url`, by names relative to it, separated by `/`.

    FileNotFoundError for a missing file, RemoteError for any other failure. Nothing is cached between calls.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS) -> None:
        """`timeout`: seconds for a small request. Range requests, which report progress, have TIMEOUT_SECONDS."""
        refuse_secrets("URL", url)
        self.url, self.timeout = strip_slashes(url), timeout
        self._files, self._root = open_url(self.url)
        self._writes = dict[str, Future[None]]()
        """The last write of each small file; one that timed out may still arrive."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes in bytes of all files below a folder; empty if it does not exist."""
        try:
            infos = self._call(lambda: self._files.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        return {path.removeprefix(self._root).lstrip("/"): self._size(path, info) for path, info in infos.items()}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._size(name, self._call(lambda: self._files.info(self._path(name))))

    def _size(self, name: str, info: Mapping[str, Any]) -> int:
        if info["size"] is None:
            raise RemoteError(f"`{name}` in `{self.url}` must have a size, but its server gives none; download it.")
        return int(info["size"])

    def version(self, name: str) -> str:
        """An identifier that changes when the file is replaced, if the store reports a change."""
        info = self._call(lambda: self._files.info(self._path(name)))
        stable = {key: value for key, value in info.items() if key != "url"}  # redirects may differ at each call
        return hashlib.sha256(str(stable).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """A small file."""
        return bytes(self._call(lambda: self._files.cat_file(self._path(name))))

    def read_if_exists(self, name: str) -> bytes | None:
        """A small file; None if it does not exist."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, and reads it back; RemoteError if it differs."""
        self._make_folder(name)
        self._await_last_write(name)
        self._writes[name] = submit(partial(self._put_in_one_request, self._path(name), content))
        self._call_writing(self._writes[name].result)
        if self.read_if_exists(name) != content:
            raise RemoteError(
                f"`{self.url}/{name}` must read back as it was written, but does not; the store loses writes."
            )

    def _await_last_write(self, name: str) -> None:
        """Waits for an earlier write that timed out, since it could still overwrite a later one; RemoteError if it does
        not end."""
        if name in self._writes:
            self._call(self._writes[name].exception)

    def _put_in_one_request(self, path: str, content: bytes) -> None:
        """Local files are replaced atomically: a full disk leaves the previous content. `files.atomic_path` would raise
        WriteError instead of the store's errors."""
        from fsspec.implementations.local import LocalFileSystem

        if not isinstance(self._files, LocalFileSystem):
            self._files.pipe_file(path, content)
            return
        folder, _, name = path.rpartition("/")
        temporary_path = f"{folder}/.{name}.partial"  # fixed, so that the file of a killed session is overwritten
        try:
            self._files.pipe_file(temporary_path, content)
            with suppress(FileNotFoundError):  # `write` detects the loss
                Path(temporary_path).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(temporary_path).unlink()
            raise

    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""
        self._await_last_write(name)
        with suppress(FileNotFoundError):
            self._call(lambda: self._files.rm_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, if the store has folders. Ignores other or missing folders."""
        if has_folders(self.url):
            with suppress(FileNotFoundError, RemoteError):
                self._call(lambda: self._files.rmdir(self._path(name)))

    def put(self, path: Path, name: str) -> None:
        """Uploads a file in parts, without verifying it. OSError if `path` cannot be read."""
        self._make_folder(name)
        part = max(BLOCK, -(-path.stat().st_size // MAX_PARTS))
        target = self._call_writing(lambda: self._files.open(self._path(name), "wb", block_size=part))
        try:
            with path.open("rb") as source:
                while block := source.read(part):
                    self._call_writing(partial(target.write, block))
            self._call_writing(target.close)
        except BaseException:
            submit(lambda: target.discard())  # nothing refers to what was sent, so errors do not matter
            raise

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a file, in order, by concurrent range requests. Yields b"" each second while
        it waits."""
        path, starts = self._path(name), iter(range(0, size, BLOCK))

        def request(start: int) -> Future[bytes]:
            return submit(lambda: bytes(self._files.cat_file(path, start=start, end=min(start + BLOCK, size))))

        pending = deque(map(request, islice(starts, PARALLEL_REQUESTS)))
        while pending:
            first, deadline = pending.popleft(), time.monotonic() + TIMEOUT_SECONDS
            while not wait([first], min(1.0, TIMEOUT_SECONDS)).done and time.monotonic() < deadline:
                yield b""
            block = self._result(first, TIMEOUT_SECONDS)
            if len(block) > BLOCK:
                raise RemoteError(
                    f"`{self.url}/{name}` must be readable in parts, but its server ignores range requests; "
                    "download it, or serve it by another."
                )
            yield block
            pending.extend(map(request, islice(starts, 1)))

    def _make_folder(self, name: str) -> None:
        if has_folders(self.url):
            folder = self._path(name).rpartition("/")[0]
            self._call_writing(lambda: self._files.makedirs(folder, exist_ok=True))

    def _call(self, function: Callable[[], T]) -> T:
        future = submit(function)
        wait([future], self.timeout)
        return self._result(future, self.timeout)

    def _call_writing(self, function: Callable[[], T]) -> T:
        """As `_call`; RemoteError if the store itself does not exist."""
        try:
            return self._call(function)
        except FileNotFoundError as error:
            raise RemoteError(
                f"`{self.url}` must be a place that exists, but is none ({error_summary(error)})."
            ) from None

    def _result(self, future: Future[T], timeout: float) -> T:
        done = future.done()  # read once, since it may end meanwhile
        error = future.exception() if done else None
        if isinstance(error, FileNotFoundError):
            raise error
        if not done:
            sentence = f"must answer, but has not for {timeout:g} s; check the network"
        elif error is None:
            return future.result()
        elif is_full(error):
            sentence = f"must have room, but has none ({error_summary(error)}); free some there"
        else:
            causes = "check the address, the network, and the credentials in the environment"
            sentence = f"must be reachable, but is not ({error_summary(error)}); {causes}"
        raise RemoteError(f"`{self.url}` {sentence}.") from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


@dataclass(frozen=True)
class ExpectedFile:
    """The expected size and checksum of a file."""

    bytes: int

    sha256: str | None = None
    """None if no checksum was recorded: then only the size is verified."""


def download(store: Store, name: str, expected: ExpectedFile, write: Callable[[bytes], object]) -> Iterator[int]:
    """Passes the blocks of a remote file to `write`, and yields the received bytes at least once a second. DamagedError
    if the file is missing or differs from `expected`; discard what was written then."""
    received, digest, problem = 0, hashlib.sha256(), "is missing"
    try:
        size = store.size(name)
        if size != expected.bytes:
            raise DamagedError(f"`{store.url}/{name}` must have {expected.bytes} bytes, but has {size} instead.")
        problem = "was removed meanwhile"
        for block in store.blocks(name, expected.bytes):
            write(block)
            digest.update(block)
            received += len(block)
            yield received
    except FileNotFoundError:
        raise DamagedError(f"`{store.url}/{name}` must exist, but {problem}.") from None
    if received != expected.bytes or (expected.sha256 is not None and digest.hexdigest() != expected.sha256):
        raise DamagedError(f"`{store.url}/{name}` must match its checksum, but does not; it was damaged.")


def with_progress(download: Iterator[int], url: str, total: int) -> Iterator[None]:
    """Drives a download that yields the bytes received so far, with a progress line every PROGRESS_SECONDS."""
    last = time.monotonic()
    for received in download:
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            print_line(f"fetching {url}: {format_gib(received)} of {format_gib(total)}")
        yield


# The local cache of remote files. One process per machine downloads a file, and renames it after verification.
#
# The cache is `~/.cache/megahead` (`$XDG_CACHE_HOME/megahead`), with a folder for each version of a remote file. A
# replaced file is downloaded again; the old version stays until it is deleted.


_POLL_SECONDS = 0.1
"""Interval of checks for the download of another process."""


def cache_folder(*identity: str) -> Path:
    """The cache folder of one version of a remote file."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "megahead" / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:20]


def local_file(name: str) -> str:
    """`name` itself, or the path of a cached copy if it is a URL; RemoteError if the file does not exist."""
    if not is_remote(name):
        return name
    refuse_secrets("URL", name)  # also in the file's name
    url, file = split_url(name)
    store = Store(url)
    try:
        expected, folder = ExpectedFile(store.size(file)), cache_folder(name, store.version(file))
    except FileNotFoundError:
        raise RemoteError(f"`{name}` must exist, but does not; check the address.") from None
    for _ in fetch_into(folder, store, {file: expected}):
        pass
    return str(folder / file)


def fetch_into(folder: Path, store: Store, files: Mapping[str, ExpectedFile]) -> Iterator[None]:
    """Downloads the files missing in `folder`, and yields at least once a second.

    One process per machine downloads a file, and the others wait for it. RemoteError also if that process makes no
    progress; DamagedError for a file that is not as expected; WriteError for a full disk.
    """
    for name, expected in files.items():
        file = yield from _lock_or_wait(folder / name)
        if file is None:
            continue
        try:
            received = download(store, name, expected, file.write_synced)
            yield from with_progress(received, f"{store.url}/{name}", expected.bytes)
            file.sync()
            file.publish()
        finally:
            file.discard()


def _lock_or_wait(target: Path) -> Generator[None, None, AtomicFile | None]:
    """Returns the locked file to write, or None once another process has downloaded it."""
    last_size, last_change = -1, time.monotonic()
    while not target.exists():
        try:
            file = AtomicFile(target)
        except InUseError:
            size = last_size
            with suppress(OSError):
                size = target.with_name(f"{target.name}.partial").stat().st_size
            if size != last_size:
                last_size, last_change = size, time.monotonic()
            if time.monotonic() - last_change > 2 * TIMEOUT_SECONDS:
                raise RemoteError(
                    f"`{target}` must be fetched by one process, but the one that does has received nothing for "
                    f"{2 * TIMEOUT_SECONDS:g} s; end it."
                ) from None
            time.sleep(_POLL_SECONDS)
            yield
        else:
            if not target.exists():
                return file
            file.discard()
    return None
