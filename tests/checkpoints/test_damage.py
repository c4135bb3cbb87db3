"""Damage of any kind is one sentence naming the file, and never another checkpoint's end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.disk import find_checkpoint, is_complete
from megahead.checkpoints.reading import open_checkpoint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.dying import die_at
from support.named import without_digits
from support.saved import save_checkpoint


def save(root: Path, step: int) -> Path:
    tensors = {f"weight/{i}": torch.full((50,), float(step + i)) for i in range(4)}
    return save_checkpoint(root, step, tensors.items(), state={"step": step}, config={}, group=Group())


def read_all(path: Path) -> int:
    """The step, once every file is verified."""
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("weight/1"), torch.full((50,), float(checkpoint.step + 1)))
    checkpoint.verify()
    return checkpoint.step


def test_every_flipped_byte_of_every_file_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for file in folder.iterdir():
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            with pytest.raises(CheckpointError, match=file.name):
                read_all(folder)
        file.write_bytes(content)
    assert read_all(folder) == 1


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_every_truncated_or_missing_file_is_named(cut: int, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=file.name):
            read_all(folder)
        file.unlink()
        with pytest.raises(CheckpointError, match=r"checkpoint\.json|missing"):
            read_all(folder)
        file.write_bytes(content)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content)))

    return edit


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_text("{"), "must be JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "must be JSON"),
        (lambda path: path.write_text("[1]"), "must hold a JSON object, but holds a list"),
        (
            edited(lambda content: {**content, "format": "megahead-checkpoint/9"}),
            "but is megahead-checkpoint/9 instead",
        ),
        (edited(lambda content: {"anything": 1}), "must be of format megahead-checkpoint/1, but is None"),
        (edited(lambda content: {**content, "step": 2}), "must match its own checksum"),
    ],
)
def test_a_wrong_manifest_is_told_in_one_sentence(damage: Callable[[Path], Any], says: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    damage(folder / "checkpoint.json")
    with pytest.raises(CheckpointError, match=says) as error:
        open_checkpoint(folder)
    assert str(folder / "checkpoint.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a checkpoint"):
        open_checkpoint(tmp_path)


def test_a_folder_of_nothing_but_damaged_ones_tells_what_the_newest_lacks(tmp_path: Path) -> None:
    (file,) = save(tmp_path, 1).glob("*.safetensors")
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=rf"{file.parent.name}/{file.name}` must have \d+ bytes, but has 100"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("replace", [False, True], ids=["next step", "same step"])
def test_a_process_killed_anywhere_in_a_save_leaves_a_sound_checkpoint(replace: bool, tmp_path: Path) -> None:
    """Ends the process at its 1st, 2nd, ... durable act until one save gets through; nothing stale remains."""
    survived = False
    for point in range(100):
        root = tmp_path / str(point)
        save(root, 1)
        child = os.fork()
        if child == 0:
            die_at(point)
            save(root, 1 if replace else 2)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        found = find_checkpoint(root)
        assert found is not None
        assert read_all(found) in (1, 2)
        assert all(is_complete(folder) for folder in root.glob("step-*"))
        save(root, 3)
        assert read_all(root) == 3
        assert not [p for p in root.iterdir() if p.name.startswith(".") or p.suffix]
        if survived:
            break
    assert survived
    assert point > 8


def test_bytes_and_names_are_on_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def recorded(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        acts.append(f"flush {re.sub('latest.*partial', 'latest.X.partial', without_digits(name))}")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        acts.append(f"name {without_digits(Path(target).name)}")
        rename(source, target)

    def replaced(source: Path, target: Path) -> None:
        acts.append(f"name {without_digits(Path(target).name)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path, 1)
    root = tmp_path.name
    files = ["tensors-00000-of-00001.safetensors", "checkpoint.json", ".step-00000001.partial"]
    named = ["name step-00000001", f"flush {root}", "flush latest.X.partial", "name latest", f"flush {root}"]
    assert acts == [f"flush {name}" for name in files] + named


@pytest.mark.parametrize("lost", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["removed", "emptied"])
def test_a_file_that_is_lost_while_its_checkpoint_is_open_is_told(lost: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    fresh, begun = open_checkpoint(folder), open_checkpoint(folder)
    begun.read("weight/0")
    (file,) = folder.glob("*.safetensors")
    lost(file)
    with pytest.raises(CheckpointError, match=f"{file.name}` must hold weight/1, but cannot be read"):
        begun.read("weight/1")
    with pytest.raises(CheckpointError, match=f"{file.name}` must (be readable, but is not|match its checksum)"):
        fresh.read("weight/1")
