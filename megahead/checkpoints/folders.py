"""Checkpoints in a run's folder: their manifests, names, and which are kept."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megahead.errors import CheckpointError
from megahead.files import fsync, write_atomically, write_durably
from megahead.run_folder import RunFolder

# `checkpoint.json`: what a step folder holds, under a checksum of its own.
#
# {"format": "megahead-checkpoint/1", "step": 1000, "state": {...}, "config": {...},
#  "tensors": {NAME: {"file": FILE or [FILE, ...], "shape", "dtype"}},
#  "files": {FILE: {"bytes", "sha256"}}, "sha256": ...}


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


# The folders under `checkpoints/`: their names, which one is used, and how they are published and removed.
#
# step-00001000/ always a complete checkpoint: it gets this name by one rename latest text: the name of the newest
# checkpoint, switched last .step-00001000.partial being written, or being removed; worthless after a crash
# step-00001000.replaced the complete old checkpoint, while a new one of the same step takes its name
# abandoned-step-00001000 set aside: the run went on from an older checkpoint; found only by this name


_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")
_LATEST = "latest"
_ABANDONED = "abandoned-"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` belongs."""
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return root / f".step-{step:08d}.partial"


def find_checkpoint(path: Path) -> Path | None:
    """The step folder that `path` means: itself, or the newest complete one in a run or checkpoints folder, if any.

    The newest is the one that `latest` names if it is complete, else the highest step. Complete means that every file
    has its full length; contents are verified when they are read.
    """
    if (path / MANIFEST).is_file():
        return path
    return next((folder for folder in step_folders(path) if is_complete(folder)), None)


def step_folders(path: Path) -> list[Path]:
    """Step folders of a run or checkpoints folder, damaged or not: the one `latest` names, then the highest steps."""
    return list(dict.fromkeys(_by_preference(_checkpoints_of(path))))


def is_complete(folder: Path) -> bool:
    """Whether the folder's manifest is undamaged and its files have the lengths that it records."""
    try:
        check_lengths(folder, Manifest.read(folder))
    except CheckpointError:
        return False
    return True


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


def clear_remains(root: Path) -> None:
    """Removes what a crash in the middle of an earlier save left behind."""
    for folder in root.glob(".step-*.partial"):
        shutil.rmtree(folder)
    for file in root.glob(f"{_LATEST}.*.partial"):
        file.unlink()
    for folder in root.glob("step-*.replaced"):
        successor = folder.with_suffix("")
        if is_complete(successor):
            remove(folder)
        else:
            folder.rename(successor)


def publish(partial: Path, final: Path) -> None:
    """Gives a complete folder its name, and points `latest` to it."""
    give_name(partial, final)
    point_to(final)


def give_name(partial: Path, final: Path) -> None:
    """Renames a complete folder to `final`, replacing an older one of that name.

    At every instant either the old or the new folder can be found.
    """
    root, replaced = final.parent, final.with_name(f"{final.name}.replaced")
    fsync(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    fsync(root)
    if replaced.exists():
        remove(replaced)


def point_to(folder: Path) -> None:
    """Makes `latest` name `folder`."""
    write_atomically(folder.parent / _LATEST, f"{folder.name}\n")


def set_aside(folders: Iterable[Path]) -> None:
    """Renames checkpoints to `abandoned-step-N`, so that from now on only that name finds them."""
    for folder in folders:
        folder.rename(_free_name(folder.with_name(f"{_ABANDONED}{folder.name}")))


def abandoned_in(path: Path) -> list[Path]:
    """The checkpoints that were set aside in a run or checkpoints folder, sorted by name."""
    return sorted(_checkpoints_of(path).glob(f"{_ABANDONED}step-*"))


def remove(folder: Path) -> None:
    """Removes a checkpoint; renames it first, so that a crash leaves no half-removed folder under its name."""
    hidden = folder.with_name(f".{folder.name}.partial")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _checkpoints_of(path: Path) -> Path:
    inside = RunFolder(path).checkpoints
    return inside if inside.is_dir() else path


def _free_name(path: Path) -> Path:
    """`path`, with a number appended if it exists."""
    names = (path if k == 1 else path.with_name(f"{path.name}-{k}") for k in count(1))
    return next(name for name in names if not name.exists())


def _by_preference(root: Path) -> Iterator[Path]:
    try:
        name = (root / _LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if _STEP.fullmatch(name) and (root / name).is_dir():
        yield root / name
    yield from steps_in(root)


def steps_in(root: Path) -> list[Path]:
    """Step folders, highest step first; `.replaced` comes after the other folder of its step."""
    found = filter(is_step_folder, root.glob("step-*"))
    return sorted(found, key=lambda folder: (step_of(folder), not folder.suffix), reverse=True)


def is_step_folder(folder: Path) -> bool:
    """Whether its name is that of a checkpoint (`step-N`, not set aside)."""
    return _STEP.fullmatch(folder.name) is not None


def step_of(folder: Path) -> int:
    """The step in a step folder's name."""
    return int(folder.name.removeprefix("step-").split(".")[0])


# Which checkpoints are kept: the last few that led to the newest one, and those that `KeepRules` name.


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class KeepRules:
    """Checkpoints that are kept in addition to the newest ones."""

    every: int | None = None
    """Those whose step is a multiple of this."""

    steps: Collection[int] = ()
    """Those of these steps."""

    best: int = 0
    """How many of those with the lowest held-out loss (`validation` in their state, if evaluated at their own step)."""

    read_now: Collection[int] = ()
    """Those of these steps, which change meanwhile: something reads them just now."""

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of this step is kept, whatever its loss."""
        return step in self.steps or step in self.read_now or (self.every is not None and step % self.every == 0)


KEEP_NO_OTHERS = KeepRules()


def abandon_after(final: Path, parent_step: int) -> None:
    """Sets aside all checkpoints above `parent_step` (that of the checkpoint which `final` continues), also one in the
    place of `final`.

    Called before `final` appears. Points `latest` to the parent first, so that after a crash in between no abandoned
    checkpoint is resumed.
    """
    root = final.parent
    above, origin = (
        [folder for folder in steps_in(root) if step_of(folder) > parent_step],
        step_folder(root, parent_step),
    )
    if above and origin.is_dir():
        point_to(origin)
    set_aside(reversed(above))


def retain(root: Path, newest: Path, keep: int, keep_rules: KeepRules = KEEP_NO_OTHERS) -> None:
    """Removes all checkpoints except `newest` (just written), the `keep - 1` highest other steps, and those that
    `keep_rules` keeps."""
    others = [folder for folder in steps_in(root) if folder != newest]
    for folder in surplus(newest, others, keep, keep_rules, step_of, Manifest.read):
        remove(folder)


def surplus(
    newest: K,
    others: Sequence[K],
    keep: int,
    keep_rules: KeepRules,
    step_of: Callable[[K], int],
    read: Callable[[K], Manifest],
) -> list[K]:
    """Those of the `others` (highest step first) that need not be kept beside `newest`. `read` may raise a
    CheckpointError, and is called for all of them if `keep_rules` keep the best, else for none."""
    best = _best([newest, *others], keep_rules.best, read)
    return [each for each in others[keep - 1 :] if each not in best and not keep_rules.holds(step_of(each))]


def _best(checkpoints: Iterable[K], count: int, read: Callable[[K], Manifest]) -> set[K]:
    """The `count` checkpoints with the lowest held-out loss."""
    if not count:
        return set()
    losses = {each: loss for each in checkpoints if (loss := _held_out_loss(partial(read, each))) is not None}
    return set(sorted(losses, key=losses.__getitem__)[:count])


def _held_out_loss(read: Callable[[], Manifest]) -> float | None:
    try:
        manifest = read()
    except CheckpointError:
        return None
    result = manifest.state.get("validation")
    if not isinstance(result, dict) or result.get("step") != manifest.step:
        return None
    loss = result.get("loss")
    return loss if isinstance(loss, float) and isfinite(loss) else None
