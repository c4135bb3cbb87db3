"""Saves that cannot succeed: every rank is told the same, and the older checkpoints are as they were."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from megahead.checkpoints import disk as saving
from megahead.checkpoints import format as snapshots
from megahead.checkpoints.disk import write_snapshot
from megahead.checkpoints.format import Header, Snapshot
from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.store import RetentionRules, new_checkpoint_name
from megahead.distributed.group import Group
from megahead.distributed.tensors import RoundRobinShard
from megahead.errors import CheckpointError
from megahead.files import WriteError, as_write_error
from support.named import without_digits
from support.on_ranks import on_ranks
from support.saved import save_checkpoint


def save(root: Path, step: int, group: Group | None = None) -> Path:
    tensors = {f"weight/{i}": torch.full((50,), float(step + i)) for i in range(4)}
    return save_checkpoint(root, step, tensors.items(), state={"step": step}, config={}, group=group or Group())


def assert_the_first_is_unharmed(root: Path) -> None:
    """And nothing beside it is left."""
    assert sorted(without_digits(path.name) for path in root.iterdir()) == ["latest", "step-00000001"]
    checkpoint = open_checkpoint(root)
    checkpoint.verify()
    assert torch.equal(checkpoint.read("weight/1"), torch.full((50,), 2.0))


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_on_full_disk(group: Group, root: str) -> str:
    """The last rank's disk is full."""
    if group.rank == group.size - 1:
        snapshots.save_file = no_room  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as error:
        save(Path(root), 2, group)
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_on_one_rank_fails_all_alike_and_harms_nothing(ranks: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    sentences = on_ranks(ranks, save_on_full_disk, str(tmp_path))
    assert len(set(sentences)) == 1
    assert "must have room for a checkpoint of 800 bytes, but its disk or quota is full" in sentences[0]
    assert_the_first_is_unharmed(tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "must have room for .* its disk or quota is full"),
        (SafetensorError("I/O error: No space left (os error 28)"), "must have room for .* its disk or quota is full"),
        (SafetensorError("I/O error: Input/output error (os error 5)"), "must take a checkpoint, but cannot"),
    ],
    ids=str,
)
def test_a_full_disk_is_told_by_whatever_it_is_reported(
    error: Exception, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(snapshots, "save_file", fail)
    with pytest.raises(CheckpointError, match=says):
        save(tmp_path, 1)


def test_a_full_disk_is_told_while_other_ranks_rename_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_a_name_without_a_file(_: Any, path: Path) -> None:
        (path.parent / ".tmp-of-another-rank").symlink_to("renamed-since")
        no_room()

    monkeypatch.setattr(snapshots, "save_file", leave_a_name_without_a_file)
    with pytest.raises(CheckpointError, match="must have room for a checkpoint of 800 bytes"):
        save(tmp_path, 1)


def test_a_disk_that_is_full_once_the_tensors_are_there_is_told_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: Any) -> None:
        with as_write_error(path):
            no_room()

    monkeypatch.setattr(saving, "write_atomically", fail)
    with pytest.raises(CheckpointError, match=r"must have room for a checkpoint of 800 bytes, .* are unharmed\)\.$"):
        save(tmp_path, 1)


def test_a_file_that_is_read_is_not_taken_for_the_output_by_a_likeness_of_names(tmp_path: Path) -> None:
    output, named_alike = tmp_path / "runs/demo", tmp_path / "demo-2/missing.bin"
    for missing, error in ((named_alike, FileNotFoundError), (output.with_name(".demo.partial") / "a", WriteError)):
        with pytest.raises(error), as_write_error(output):
            missing.open("rb")


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError("no model of that name")])
def test_an_error_that_is_no_files_is_not_taken_for_one_of_writing(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(OSError, match=f"^{error}$"), as_write_error(tmp_path / "output"):
        raise error
    with pytest.raises(WriteError, match="must be writable"), as_write_error(tmp_path / "output"):
        raise OSError(errno.EIO, "Input/output error")


def test_what_does_not_read_back_as_it_was_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    write = snapshots.save_file
    for spoiled in (torch.zeros(50), torch.full((5, 10), 4.0)):
        tensors = {"weight/2": spoiled}
        monkeypatch.setattr(snapshots, "save_file", lambda all_, path, changed=tensors: write(all_ | changed, path))
        with pytest.raises(CheckpointError, match=r"^`\S+` must read back as it was written, but weight/2 does"):
            save(tmp_path, 2)
        assert_the_first_is_unharmed(tmp_path)


def test_what_is_copied_does_not_follow_what_goes_on_changing(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    snapshot = Snapshot.take([("weight", weight), ("turned", weight.T)], Group(), copied=True)
    assert not any(tensor.requires_grad for tensor in snapshot.tensors.values())
    with torch.no_grad():
        weight.zero_()
    write_snapshot(tmp_path, Header(new_checkpoint_name(1), 1, {}, {}), snapshot, Group(), RetentionRules())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("weight").tolist() == checkpoint.read("turned").T.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_save_succeeds_where_an_older_checkpoint_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saving.DiskStorage, "remove", refuse)
    tensors = {"weight": torch.ones(50)}
    save_checkpoint(tmp_path, 2, tensors.items(), state={}, config={}, group=Group(), rules=RetentionRules(newest=1))
    assert open_checkpoint(tmp_path).step == 2
    assert capsys.readouterr().err == (
        "warning: an older checkpoint cannot be removed ([Errno 13] Permission denied).\n"
    )


def test_too_little_room_is_seen_before_writing_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    usage = saving.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage._replace(free=300))
    with pytest.raises(CheckpointError, match="room for a checkpoint of 800 bytes, but 500 bytes are missing"):
        save(tmp_path, 2)
    assert_the_first_is_unharmed(tmp_path)


def test_what_was_written_so_far_counts_as_room_when_the_disk_fills_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: Any, path: Path) -> None:
        path.write_bytes(bytes(600))
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage._replace(free=0))
        no_room()

    save(tmp_path, 1)
    monkeypatch.setattr(snapshots, "save_file", fill)
    with pytest.raises(CheckpointError, match="room for a checkpoint of 800 bytes, but 200 bytes are missing"):
        save(tmp_path, 2)
    assert_the_first_is_unharmed(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CheckpointError, match="checkpoints"):
        save(blocker / "checkpoints", 1)


def test_room_is_asked_for_as_many_bytes_as_all_ranks_write() -> None:
    def total(group: Group) -> int:
        dealt = RoundRobinShard(torch.zeros(6, 3)[group.rank :: group.size], 6)
        return Snapshot.take([("weight/rows", dealt), ("weight/0", torch.zeros(5))], group).total_bytes

    for ranks in (1, 2, 3):
        assert {total(Group(rank, ranks)) for rank in range(ranks)} == {4 * (6 * 3 + 5)}


def test_folders_above_that_are_missing_are_made(tmp_path: Path) -> None:
    assert open_checkpoint(save(tmp_path / "runs" / "first" / "checkpoints", 1)).step == 1


def test_a_folder_in_which_another_rank_s_file_arrived_cut_off_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    write = snapshots.Manifest.write

    def lose_some(manifest: snapshots.Manifest, folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        write(manifest, folder)

    monkeypatch.setattr(snapshots.Manifest, "write", lose_some)
    with pytest.raises(CheckpointError, match=r"must have \d+ bytes, but has \d+ instead"):
        save(tmp_path, 2)
    assert_the_first_is_unharmed(tmp_path)
