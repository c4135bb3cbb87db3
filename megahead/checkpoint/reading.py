"""A checkpoint that is open: its state, and its tensors one by one, each file verified before it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahead.checkpoint.folders import candidates, check_lengths, find_checkpoint
from megahead.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Manifest, TensorEntry
from megahead.errors import CheckpointError
from megahead.files import sha256_of


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that `path` means (a step folder, a checkpoints folder, a run folder).

    Checks the manifest and the length of every file; contents are verified when they are read. Raises a
    CheckpointError that names the file at fault.
    """
    folder = find_checkpoint(path)
    if folder is None:
        for damaged in candidates(path):
            _opened(damaged)
        raise CheckpointError(
            f"`{path}` must be a checkpoint (a folder with {MANIFEST}) or hold complete ones (step-*), but does not."
        )
    return _opened(folder)


def newest_sound(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run or checkpoints folder that is sound in every byte, and a sentence for each newer
    one that is not. Reads all of it, about a second a GB."""
    damage = []
    for folder in candidates(path):
        try:
            checkpoint = _opened(folder)
            checkpoint.verify()
        except CheckpointError as error:
            damage.append(str(error))
        else:
            return checkpoint, damage
    return None, damage


def _opened(folder: Path) -> Checkpoint:
    manifest = Manifest.read(folder)
    check_lengths(folder, manifest)
    return Checkpoint(folder, manifest)


class Checkpoint:
    """A complete step folder; see `open_checkpoint`."""

    format = FORMAT

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._verified: set[str] = set()

    @property
    def step(self) -> int:
        """Optimizer steps of the run when it was saved."""
        return self._manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """What the trainer counts besides tensors."""
        return self._manifest.state

    def stated(self, name: str, kind: Any, absent: Any = None) -> Any:
        """`state[name]`, or `absent` where it does not stand (what earlier versions did not know); CheckpointError
        unless that is a `kind` (a type or a union of types)."""
        value = self.state.get(name, absent)
        if not isinstance(value, kind):
            raise CheckpointError(
                f"`{self.folder / MANIFEST}` must state `{name}`, but does not rightly; use another checkpoint."
            )
        return value

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run that wrote it."""
        return self._manifest.config

    @property
    def files(self) -> dict[str, FileEntry]:
        """Length and checksum of each file of tensors."""
        return self._manifest.files

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """File, shape and dtype of each tensor, without reading any."""
        return self._manifest.tensors

    def names(self) -> list[str]:
        """Names of the tensors, in the order they were saved."""
        return list(self._manifest.tensors)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU.

        The first tensor of each file costs that file's checksum too (a full read, about a second a GB); later
        ones only their own bytes. Raises a CheckpointError if the name is unknown or the file is damaged.
        """
        entry = self._manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"`{self.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
            )
        self._verify_once(entry.file)
        try:
            with safe_open(self.folder / entry.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"`{self.folder / entry.file}` must hold {name}, but cannot be read ({error})."
            ) from None
        return tensor

    def verify(self) -> None:
        """Verifies the checksum of every file that was not read yet; a full read, about a second a GB."""
        for file in self._manifest.files:
            self._verify_once(file)

    def _verify_once(self, file: str) -> None:
        if file in self._verified:
            return
        path = self.folder / file
        try:
            found = sha256_of(path)
        except OSError as error:
            raise CheckpointError(f"`{path}` must be readable, but is not ({error.strerror}).") from None
        if found != self._manifest.files[file].sha256:
            raise CheckpointError(
                f"`{path}` must match its checksum, but does not; it was damaged, use another checkpoint."
            )
        self._verified.add(file)
