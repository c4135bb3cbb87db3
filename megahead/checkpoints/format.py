"""The format of a checkpoint: manifest, tensors, checksums; snapshots, and writing on all ranks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megahead.distributed.group import Group
from megahead.distributed.tensors import RoundRobinShard
from megahead.errors import CheckpointError, message_of
from megahead.files import fsync, sha256_of
from megahead.remote_files import DamagedError

# `checkpoint.json`: the content of a step folder, with its own checksum.
#
# {"format": "megahead-checkpoint/1", "step": 1000, "state": {...}, "config": {...},
#  "tensors": {TENSOR: {"file": FILE or [FILE, ...], "shape", "dtype"}},
#  "files": {FILE: {"bytes", "sha256"}}, "parents": [NAME, ...], "orphaned": [NAME, ...], "sha256": ...}
#
# `parents` are all ancestors.


MANIFEST = "checkpoint.json"
FORMAT = "megahead-checkpoint/1"


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")]
"""A name without folders: all files of a checkpoint are in its folder."""


class TensorEntry(BaseModel):
    """File, shape and dtype of a tensor."""

    model_config = ConfigDict(frozen=True)
    file: FileName | tuple[FileName, ...]
    """With R files the tensor is sharded round-robin: row i is in file i mod R."""
    shape: tuple[int, ...]
    dtype: str

    def files(self) -> tuple[str, ...]:
        return (self.file,) if isinstance(self.file, str) else self.file


class FileEntry(BaseModel):
    """Length and checksum of a file."""

    model_config = ConfigDict(frozen=True)
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The content of a `checkpoint.json`."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    step: int = Field(ge=0)
    state: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]

    ancestors: tuple[str, ...] = Field((), alias="parents")
    """The newest first, including removed ones; empty in checkpoints of earlier versions."""

    orphaned: tuple[str, ...] = ()
    """Other checkpoints that existed when it was saved: the run had rolled back past them."""

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @model_validator(mode="after")
    def _check_files_listed(self) -> Manifest:
        for name, entry in self.tensors.items():
            for file in entry.files():
                if file not in self.files:
                    raise ValueError(f"{name} is in {file}, which is not listed")
        return self

    def write(self, folder: Path) -> None:
        """Writes the manifest to `folder` and waits until it is on disk."""
        content = json.loads(json.dumps({"format": FORMAT, **self.model_dump(by_alias=True)}))
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        fsync(folder / MANIFEST)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of `folder`; CheckpointError if the file is missing, damaged or of another format."""
        path = folder / MANIFEST
        try:
            return Manifest.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise CheckpointError(
                f"`{path}` must be readable in a checkpoint folder, but is not ({error.strerror})."
            ) from None

    @staticmethod
    def parse(text: bytes, path: str) -> Manifest:
        """Parses a manifest; CheckpointError, which names `path`, if it is damaged or of another format."""
        try:
            content = json.loads(text.decode("utf-8"))
        except ValueError:
            raise CheckpointError(
                f"`{path}` must be JSON, but is not; it was damaged, use another checkpoint."
            ) from None
        if not isinstance(content, dict):
            raise CheckpointError(f"`{path}` must hold a JSON object, but holds a {type(content).__name__} instead.")
        version = content.get("format")
        if version != FORMAT:
            raise CheckpointError(
                f"`{path}` must be of format {FORMAT}, but is {version} instead; use the version that wrote it."
            )
        recorded = content.pop("sha256", None)
        if recorded != _digest(content):
            raise CheckpointError(
                f"`{path}` must match its own checksum, but does not; it was damaged or edited, use another checkpoint."
            )
        try:
            return Manifest.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(key) for key in first["loc"]) or "list of files"
            raise CheckpointError(
                f"`{path}` must hold a valid `{location}`, but does not ({first['msg']}); use another checkpoint."
            ) from None


@dataclass(frozen=True)
class Header:
    """A checkpoint's metadata: its manifest without tensors and files."""

    name: str
    step: int
    state: dict[str, Any]
    config: dict[str, Any]
    ancestors: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()

    def manifest(self, tensors: dict[str, TensorEntry], files: dict[str, FileEntry]) -> Manifest:
        return Manifest(**{**vars(self), "tensors": tensors, "files": files})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_lengths(folder: Path, manifest: Manifest) -> None:
    """Raises a CheckpointError naming the first file that is missing or of the wrong length."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"`{path}` must exist in this checkpoint, but is missing; use another checkpoint.")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                f"`{path}` must have {entry.bytes} bytes, but has {size} instead; use another checkpoint."
            )


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a checkpoint's tensors, and the manifest entries of all of them."""

    tensors: dict[str, Tensor]
    file: str
    file_names: list[str]
    entries: dict[str, TensorEntry]
    bytes_by_rank: list[int]
    """Approximate bytes that each rank writes."""

    @property
    def total_bytes(self) -> int:
        """The bytes of all ranks."""
        return sum(self.bytes_by_rank)

    @staticmethod
    def take(
        tensors: Iterable[tuple[str, Tensor | RoundRobinShard]], group: Group, *, copied: bool = False
    ) -> Snapshot:
        """Assigns each tensor to the rank with the fewest bytes so far (the same on every rank); each rank writes its
        rows of a round-robin shard. `copied`: copy the tensors, so that the originals may change."""
        names = [f"tensors-{rank:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)]
        loads = [0] * group.size
        assigned: dict[str, Tensor] = {}
        entries: dict[str, TensorEntry] = {}
        for name, tensor in tensors:
            writers = range(group.size) if isinstance(tensor, RoundRobinShard) else (loads.index(min(loads)),)
            part, shape = (tensor.part, tensor.shape) if isinstance(tensor, RoundRobinShard) else (tensor, tensor.shape)
            for rank in writers:
                loads[rank] += shape.numel() * part.itemsize // len(writers)
            files = tuple(names[rank] for rank in writers)
            dtype = str(part.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(file=files if len(files) > 1 else files[0], shape=tuple(shape), dtype=dtype)
            if group.rank in writers:
                assigned[name] = part.detach().to("cpu", copy=True).contiguous() if copied else _standalone(part)
        return Snapshot(assigned, names[group.rank], names, entries, loads)

    def write(self, folder: Path) -> FileEntry:
        """Writes this rank's file and reads it back; CheckpointError if they differ."""
        path = folder / self.file
        save_file(self.tensors, path)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only the user can read
        fsync(path)
        with safe_open(path, framework="pt") as file:
            wrong = [name for name, tensor in self.tensors.items() if not _same_bytes(tensor, file.get_tensor(name))]
        if wrong:
            raise CheckpointError(
                f"`{path}` must read back as it was written, but {wrong[0]} does not; check the disk."
            )
        return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))


def _standalone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and in a storage of its own, as safetensors requires; copied only if needed."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


_BLOCK_BYTES = 1 << 20
"""Bytes per read, into one buffer."""


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[None]:
    """Reads `files`, about 1 GB per second, and yields after each block; CheckpointError for the first damaged one."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    for name, entry in files.items():
        path, digest = folder / name, hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while size := file.readinto(block):
                    digest.update(block[:size])
                    yield
        except OSError as error:
            raise CheckpointError(f"`{path}` must be readable, but is not ({error.strerror}).") from None
        if digest.hexdigest() != entry.sha256:
            raise CheckpointError(
                f"`{path}` must match its checksum, but does not; it was damaged, use another checkpoint."
            )


def share_of(files: Mapping[str, FileEntry], group: Group) -> dict[str, FileEntry]:
    """This rank's share of `files`: the largest first, each goes to the rank with the fewest bytes so far."""
    loads = [0] * group.size
    assigned = {}
    for name, entry in sorted(files.items(), key=lambda item: item[1].bytes, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += entry.bytes
        if rank == group.rank:
            assigned[name] = entry
    return assigned


# Functions that run on every rank: afterwards all ranks continue, or all raise.


T = TypeVar("T")
DescribeError = Callable[[Exception], str]

SYNC_SECONDS = 5.0
"""Interval of the ranks' synchronization."""


def run_on_all_ranks(group: Group, action: Callable[[], T], describe_error: DescribeError = message_of) -> list[T]:
    """Runs `action` on every rank; returns all ranks' (small) results in rank order. Collective.

    If it fails on any rank, all ranks raise a CheckpointError (for a DamagedError, a DamagedError). Its message is the
    first failing rank's `describe_error(error)`, or `str(error)` if `describe_error` fails. Costs one all-gather of
    objects, which is also a barrier.
    """
    cause: Exception | None = None
    results: list[T] = []
    failure_info: tuple[type[CheckpointError | DamagedError], str] | None = None
    try:
        results = [action()]
    except Exception as error:
        cause = error
        error_type = DamagedError if isinstance(error, DamagedError) else CheckpointError
        failure_info = error_type, str(error)
        with suppress(Exception):
            failure_info = error_type, describe_error(error)
    gathered = group.all_gather_objects((results, failure_info))
    for _, failure in gathered:
        if failure is not None:
            raise failure[0](failure[1]) from cause
    return [result for rank_results, _ in gathered for result in rank_results]


def run_on_first_rank(group: Group, action: Callable[[], T], describe_error: DescribeError = message_of) -> T:
    """Runs `action` on rank 0 as in `run_on_all_ranks`; returns its (small) result on all ranks. Collective."""
    return run_on_all_ranks(group, lambda: [action()] if group.rank == 0 else [], describe_error)[0][0]


def run_generator_on_all_ranks(
    group: Group, work: Iterator[None], describe_error: DescribeError = message_of
) -> list[Any]:
    """Runs the generator `work` to its end on every rank, with errors as in `run_on_all_ranks`; returns the
    generators' return values in rank order. Collective.

    `work` must yield often: all ranks synchronize every few seconds, well within `group.timeout_seconds`, so that ranks
    with less work do not time out.
    """
    interval = min(SYNC_SECONDS, group.timeout_seconds / 10)
    results: list[Any] = []

    def advance() -> list[Any]:
        deadline = time.monotonic() + interval
        while not results:
            try:
                next(work)
            except StopIteration as end:
                results.append(end.value)
            if time.monotonic() >= deadline:
                break
        return results

    while not all(gathered := run_on_all_ranks(group, advance, describe_error)):
        pass
    return [result for (result,) in gathered]
