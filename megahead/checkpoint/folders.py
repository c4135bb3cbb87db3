"""The folders under `checkpoints/`: their names, which one is used, and how they are published and removed.

step-00001000/            always a complete checkpoint: it gets this name by one rename
latest                    text: the name of the newest checkpoint, switched last
.step-00001000.partial    being written, or being removed; worthless after a crash
step-00001000.replaced    the complete old checkpoint, while a new one of the same step takes its name
abandoned-step-00001000   set aside: the run went on from an older checkpoint; found only by this name
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from megahead.checkpoint.manifest import MANIFEST, Manifest
from megahead.errors import CheckpointError
from megahead.files import fsync, write_atomically
from megahead.run_folder import RunFolder

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
