"""The folders under `checkpoints/`: their names, which one counts, and how they come and go.

step-00001000/            a complete checkpoint, always: it appears under this name by one rename
latest                    text: the name of the newest one, switched last
.step-00001000.partial    being written, or being removed; worthless after a crash
step-00001000.replaced    complete, while a new one takes its name
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megahead.checkpoint.manifest import MANIFEST, Manifest
from megahead.errors import CheckpointError
from megahead.files import flush, write_atomically

_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")
_LATEST = "latest"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` belongs."""
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return root / f".step-{step:08d}.partial"


def find_checkpoint(path: Path) -> Path | None:
    """The step folder that `path` means: itself, or the newest complete one in a run or checkpoints folder.

    `latest` decides where it names a complete folder, else the highest step does. Complete means that every
    file is there in its full length; contents are verified when they are read. None where there is nothing.
    """
    if (path / MANIFEST).is_file():
        return path
    return next((folder for folder in candidates(path) if is_complete(folder)), None)


def candidates(path: Path) -> list[Path]:
    """Step folders of a run or checkpoints folder, sound or not: the one `latest` names, then the highest steps."""
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return list(dict.fromkeys(_by_preference(root)))


def is_complete(folder: Path) -> bool:
    """Whether the folder's manifest is sound and its files have their lengths."""
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
    """Removes what a crash left in the middle of an earlier save."""
    for folder in root.glob(".step-*.partial"):
        shutil.rmtree(folder)
    for folder in root.glob("step-*.replaced"):
        successor = folder.with_suffix("")
        if is_complete(successor):
            remove(folder)
        else:
            folder.rename(successor)


def publish(partial: Path, final: Path) -> None:
    """Gives a complete folder its name, in place of an older one of that name, and points `latest` to it.

    At every instant one of the old and the new folder can be found.
    """
    root, replaced = final.parent, final.with_name(f"{final.name}.replaced")
    flush(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush(root)
    write_atomically(root / _LATEST, f"{final.name}\n")
    if replaced.exists():
        remove(replaced)


def remove(folder: Path) -> None:
    """Removes a checkpoint; its name first, so that a crash on the way leaves no half folder that looks whole."""
    hidden = folder.with_name(f".{folder.name}.partial")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _by_preference(root: Path) -> Iterator[Path]:
    try:
        name = (root / _LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if _STEP.fullmatch(name) and (root / name).is_dir():
        yield root / name
    yield from steps_in(root)


def steps_in(root: Path) -> list[Path]:
    """Step folders, highest step first; of two of one step the one that keeps its name."""
    found = [(match, folder) for folder in root.glob("step-*") if (match := _STEP.fullmatch(folder.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), pair[0][2] is None), reverse=True)
    return [folder for _, folder in found]
