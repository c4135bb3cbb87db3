"""`checkpoint.json`: what a step folder holds, under a checksum of its own.

{"format": "megahead-checkpoint/1", "step": 1000, "state": {...}, "config": {...},
 "tensors": {NAME: {"file": FILE or [FILE, ...], "shape", "dtype"}},
 "files": {FILE: {"bytes", "sha256"}}, "sha256": ...}
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megahead.errors import CheckpointError
from megahead.files import write_durably

MANIFEST = "checkpoint.json"
FORMAT = "megahead-checkpoint/1"


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")]
"""A plain name: files of a checkpoint are in its own folder."""


class TensorEntry(BaseModel):
    """Where a tensor is, and what it looks like."""

    model_config = ConfigDict(frozen=True)
    file: FileName | tuple[FileName, ...]
    """A tensor in R files is sharded round-robin: row i is in file i mod R."""
    shape: tuple[int, ...]
    dtype: str

    def files(self) -> tuple[str, ...]:
        """The files that hold it, one or several."""
        return (self.file,) if isinstance(self.file, str) else self.file


class FileEntry(BaseModel):
    """Length and checksum of a file."""

    model_config = ConfigDict(frozen=True)
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The content of a `checkpoint.json`."""

    model_config = ConfigDict(frozen=True)
    step: int = Field(ge=0)
    state: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]

    @model_validator(mode="after")
    def _complete(self) -> Manifest:
        """Every tensor is in a file that is listed."""
        for name, entry in self.tensors.items():
            for file in entry.files():
                if file not in self.files:
                    raise ValueError(f"{name} is in {file}, which is not listed")
        return self

    def write(self, folder: Path) -> None:
        """Writes the manifest to `folder` and waits until it is on disk."""
        content = json.loads(json.dumps({"format": FORMAT, **self.model_dump()}))
        write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1))

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
        """The manifest in the content of a file; CheckpointError, which names `path`, if it is damaged or of another
        format."""
        content = _parse_json(text, path)
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
            where = ".".join(str(key) for key in first["loc"]) or "list of files"
            raise CheckpointError(
                f"`{path}` must hold a valid `{where}`, but does not ({first['msg']}); use another checkpoint."
            ) from None


def _parse_json(text: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(text.decode("utf-8"))
    except ValueError:
        raise CheckpointError(f"`{path}` must be JSON, but is not; it was damaged, use another checkpoint.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object, but holds a {type(content).__name__} instead.")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
