"""Checksums of large checkpoints: shared out over ranks, read once, and no rank gives up on the others meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megahead.checkpoints import reading
from megahead.checkpoints.format import FileEntry, share_of
from megahead.checkpoints.reading import newest_valid, open_checkpoint
from megahead.checkpoints.store import RetentionRules
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.saved import save_checkpoint


def save(group: Group, root: str, step: int = 1) -> None:
    tensors = {f"weight/{k}": torch.full((64,), float(k)) for k in range(8)}
    save_checkpoint(Path(root), step, tensors.items(), state={}, config={}, group=group, rules=RetentionRules(9))


def impatient(group: Group, seconds: float) -> Group:
    """The same ranks, which wait for each other for `seconds` only."""
    return replace(group, timeout_seconds=seconds).new_gloo_group()


def verify_slowly(group: Group, root: str) -> float:
    """A file takes rank 0 three times as long as ranks wait for each other; the others have nothing to do."""
    check_files = reading.check_files

    def slowly(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[None]:
        for _ in range(30 if files else 0):
            time.sleep(0.1)
            yield
        yield from check_files(folder, files)

    reading.check_files = slowly
    started = time.monotonic()
    checkpoint, damage = newest_valid(Path(root), impatient(group, 1.0))
    assert checkpoint is not None
    assert not damage
    return time.monotonic() - started


def test_no_rank_gives_up_on_another_that_reads_for_long(tmp_path: Path) -> None:
    save(Group(), str(tmp_path))
    assert min(on_ranks(2, verify_slowly, str(tmp_path))) > 3


def read_and_count(group: Group, root: str) -> list[str]:
    """The files of which this rank read the checksum, of a checkpoint that it then reads all of."""
    read, check_files = [], reading.check_files

    def noted(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[None]:
        read.extend(files)
        yield from check_files(folder, files)

    reading.check_files = noted
    checkpoint, _ = newest_valid(Path(root), group)
    assert checkpoint is not None
    assert all((checkpoint.read(f"weight/{k}") == k).all() for k in range(8))
    return read


def test_each_file_is_verified_by_one_rank_and_trusted_by_all(tmp_path: Path) -> None:
    on_ranks(4, save, str(tmp_path))
    for ranks in (1, 2, 4):
        shares = on_ranks(ranks, read_and_count, str(tmp_path))
        assert [len(share) for share in shares] == [4 // ranks] * ranks
        assert {name for share in shares for name in share} == open_checkpoint(tmp_path).files.keys()


def told(group: Group, root: str) -> tuple[int, list[str]]:
    checkpoint, damage = newest_valid(Path(root), group)
    assert checkpoint is not None
    return checkpoint.step, damage


def test_what_one_rank_finds_damaged_all_pass_over_with_one_sentence(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        on_ranks(2, save, str(tmp_path), step)
    for step, file in ((3, 0), (2, 1)):
        path = sorted(folder_of(tmp_path, step).glob("*.safetensors"))[file]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    first, second = on_ranks(2, told, str(tmp_path))
    assert first == second
    step, damage = first
    assert step == 1
    assert ["must match its checksum" in sentence for sentence in damage] == [True, True]
    told_of = [without_digits(sentence) for sentence in damage]
    assert ["step-00000003/tensors-00000" in told_of[0], "step-00000002/tensors-00001" in told_of[1]] == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_is_too_short_is_seen_before_any_is_read(ranks: int, tmp_path: Path) -> None:
    on_ranks(2, save, str(tmp_path), 1)
    on_ranks(2, save, str(tmp_path), 2)
    path = sorted(folder_of(tmp_path, 2).glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])
    for step, (sentence,) in on_ranks(ranks, told, str(tmp_path)):
        assert step == 1
        assert f"`{path}` must have" in sentence


def test_what_cannot_be_read_is_not_called_changed(tmp_path: Path) -> None:
    on_ranks(2, save, str(tmp_path), 1)
    checkpoint = open_checkpoint(tmp_path)
    path = sorted(checkpoint.folder.glob("*.safetensors"))[0]
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="must be readable, but is not"):
        checkpoint.verify()


def test_bytes_are_shared_out_evenly() -> None:
    files = {f"{k}.safetensors": FileEntry(bytes=size, sha256="") for k, size in enumerate((7, 1, 5, 3, 6, 2))}
    shares = [share_of(files, Group(rank, 3)) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert [sum(entry.bytes for entry in share.values()) for share in shares] == [8, 8, 8]
    assert share_of({}, Group()) == {}
