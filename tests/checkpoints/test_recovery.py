"""What is left of copies in memory after a node is lost becomes the checkpoint that it would have been, or is refused
with a sentence."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megahead import files as writing
from megahead.checkpoints import format as checkpoint_format
from megahead.checkpoints import memory as handing_over
from megahead.checkpoints.format import Manifest
from megahead.checkpoints.memory import last_session_id, share_replicas, wait_for_spare_ranks
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.run_folder import RunFolder
from support.copied_state import MARK, keep, rescue, same_as_on_disk
from support.named import without_digits
from support.network_disk import NetworkDisk
from support.node_memories import give_memory, leave_room, memory_of
from support.on_ranks import on_ranks


@pytest.mark.parametrize(("nodes", "left"), [("01", "0"), ("01", "1"), ("0011", "11"), ("012", "02"), ("001", "1")])
def test_without_one_node_the_rest_has_all_of_it(tmp_path: Path, nodes: str, left: str) -> None:
    on_ranks(len(nodes), keep, tmp_path, nodes, (4,))
    for lost in set(nodes) - set(left):
        shutil.rmtree(memory_of(tmp_path, int(lost)))
    assert on_ranks(len(left), rescue, tmp_path, left) == [(4, 4, [])] * len(left)
    assert same_as_on_disk(tmp_path, 4, len(nodes))


def test_one_node_keeps_one_copy_which_outlives_its_processes(tmp_path: Path) -> None:
    there = on_ranks(2, keep, tmp_path, "00", (4,))[0]
    assert sum(file.endswith(".safetensors") for file in there) == 2
    assert on_ranks(1, rescue, tmp_path, "0") == [(4, 4, [])]
    assert same_as_on_disk(tmp_path, 4, 2)


def test_the_last_copy_stays_until_the_next_is_complete_and_the_newest_is_taken(tmp_path: Path) -> None:
    there = on_ranks(2, keep, tmp_path, "01", (2, 4, 6))
    for rank, files in enumerate(there):
        steps = {without_digits(file.split("/")[1]) for file in files}
        assert steps == {"step-00000004", "step-00000006"}, files
        assert {file.split("/")[0] for file in files} == {f"rank-{rank:05d}"}
    assert on_ranks(2, rescue, tmp_path, "01", 5) == [(6, 1, [])] * 2


def test_what_is_older_than_the_disks_is_left_alone(tmp_path: Path) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    assert on_ranks(2, rescue, tmp_path, "01", 4) == [None] * 2
    assert not (tmp_path / "run/checkpoints").exists()


def test_copies_of_another_session_are_never_used_and_removed_by_the_next(tmp_path: Path) -> None:
    on_ranks(2, keep, tmp_path, "01", (8,))
    (tmp_path / "run/session").write_text("a later one")
    assert on_ranks(2, rescue, tmp_path, "01") == [None] * 2
    (tmp_path / "run/session").unlink()  # it ended by itself
    assert on_ranks(2, rescue, tmp_path, "01") == [None] * 2
    there = on_ranks(2, keep, tmp_path, "01", (2,), "a third")
    assert {without_digits(file.split("/")[1]) for files in there for file in files} == {"step-00000002"}


def test_two_runs_of_one_machine_do_not_mix(tmp_path: Path) -> None:
    for name, step in (("one", 2), ("two", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory-0").symlink_to(tmp_path / "memory")
        (tmp_path / "memory").mkdir(exist_ok=True)
        on_ranks(1, keep, tmp_path / name, "0", (step,))
    assert len(list((tmp_path / "memory").iterdir())) == 2
    assert on_ranks(1, rescue, tmp_path / "one", "0") == [(2, 2, [])]
    assert on_ranks(1, rescue, tmp_path / "two", "0") == [(4, 4, [])]


def hand(group: Group, folder: Path, launch: Launch) -> None:
    give_memory(folder, launch.rank)
    share_replicas(RunFolder(folder / "run"), launch)


def test_nodes_whose_ranks_only_wait_hand_over_what_the_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four nodes the last is lost, and two can train: on these the third's file is missing."""
    on_ranks(4, keep, tmp_path, "0123", (4,))
    shutil.rmtree(memory_of(tmp_path, 3))
    shutil.move(memory_of(tmp_path, 0), memory_of(tmp_path, 4))  # ranks are numbered anew
    on_ranks(1, hand, tmp_path, Launch(rank=4, world_size=2, spare_ranks=1, port=1))
    monkeypatch.setattr(handing_over, "WAIT_SECONDS", 0.2)
    assert on_ranks(2, rescue, tmp_path, "12") == [(4, 4, [])] * 2
    assert same_as_on_disk(tmp_path, 4, 4)


def handed_over(folder: Path) -> list[str]:
    return sorted("/".join(path.parts[-2:]) for path in (folder / "run/handed-over").rglob("*.safetensors"))


@pytest.mark.parametrize("training", [2, 3])
def test_the_ranks_of_one_node_hand_over_one_copy_and_none_where_one_trains(tmp_path: Path, training: int) -> None:
    """Ranks 2 and 3 have one memory."""
    on_ranks(2, keep, tmp_path, "01", (4,))
    shutil.move(memory_of(tmp_path, 1), memory_of(tmp_path, 2))
    memory_of(tmp_path, 3).symlink_to(memory_of(tmp_path, 2))
    for rank in range(training, 4):
        launch = Launch(rank=rank, world_size=training, local_rank=rank - 2, spare_ranks=4 - training, port=1)
        on_ranks(1, hand, tmp_path, launch)
    assert len(handed_over(tmp_path)) == (2 if training == 2 else 0)
    launch = Launch(world_size=training, spare_ranks=4 - training, port=1)
    began = time.monotonic()
    wait_for_spare_ranks(RunFolder(tmp_path / "run"), MARK, launch, 20)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("missing", [0, 1])
def test_copies_that_would_leave_no_room_for_the_checkpoint_are_not_handed_over(tmp_path: Path, missing: int) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    (replica,) = memory_of(tmp_path, 1).rglob("step-*")
    checkpoint_bytes = Manifest.read(replica).total_bytes
    copy_bytes = sum(file.stat().st_size for file in replica.iterdir())

    def hand_with_little_room(group: Group) -> None:
        give_memory(tmp_path, 1)
        leave_room(checkpoint_bytes + copy_bytes - missing)
        share_replicas(RunFolder(tmp_path / "run"), Launch(rank=1, world_size=1, spare_ranks=1, port=1))

    on_ranks(1, hand_with_little_room)
    assert bool(handed_over(tmp_path)) == (missing == 0)


def rescue_timed(group: Group, *args: Any) -> tuple[Any, float]:
    began = time.monotonic()
    return rescue(group, *args), time.monotonic() - began


def test_those_that_wait_are_waited_for_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    monkeypatch.setattr(handing_over, "WAIT_SECONDS", 0.5)
    ((found, seconds),) = on_ranks(1, rescue_timed, tmp_path, "0", -1, 2)
    assert found == (4, 4, [])
    assert 0.5 <= seconds < 20


def test_what_they_hand_over_is_seen_on_a_disk_whose_clients_remember_what_was_missing(tmp_path: Path) -> None:
    """Training ranks look for it before it is there."""
    on_ranks(2, keep, tmp_path, "01", (4,))
    launch = Launch(world_size=1, spare_ranks=1, port=1)

    def wait(group: Group) -> float:
        if group.rank == 1:
            time.sleep(0.5)
            hand(group, tmp_path, replace(launch, rank=1))
            return 0.0
        NetworkDisk(tmp_path)
        began = time.monotonic()
        wait_for_spare_ranks(RunFolder(tmp_path / "run"), str(last_session_id(RunFolder(tmp_path / "run"))), launch, 20)
        return time.monotonic() - began

    assert 0.4 < on_ranks(2, wait)[0] < 10


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SPOILED = {
    "flipped": (flip, "must match its checksum, but does not"),
    "cut short": (cut, "must match its checksum, but does not"),
    "gone": (Path.unlink, "the replica of step 4 in memory must be complete to be used, but tensors-00001-of-00002"),
}


@pytest.mark.parametrize("damage", SPOILED)
def test_a_spoiled_copy_is_passed_over_with_a_sentence(tmp_path: Path, damage: str) -> None:
    on_ranks(2, keep, tmp_path, "01", (2, 4))
    shutil.rmtree(memory_of(tmp_path, 1))
    spoil, says = SPOILED[damage]
    (mine,) = memory_of(tmp_path, 0).rglob("step-00000004-*/tensors-00001-of-00002.safetensors")
    spoil(mine)
    ((step, newer_by, problems),) = on_ranks(1, rescue, tmp_path, "0", 1)
    assert (step, newer_by) == (2, 1)
    assert says in " ".join(problems)
    assert "tensors-00001-of-00002.safetensors is on none of the remaining nodes" in problems[-1]


def test_a_spoiled_file_is_replaced_by_another_nodes(tmp_path: Path) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    for file in memory_of(tmp_path, 0).rglob("*.safetensors"):
        flip(file)
    ((step, _, problems), other) = on_ranks(2, rescue, tmp_path, "01")
    assert other == (step, 4, problems)
    assert step == 4
    assert len(problems) == 2
    assert same_as_on_disk(tmp_path, 4, 2)


def test_where_no_copy_is_sound_the_disks_counts(tmp_path: Path) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    for memory in (0, 1):
        for manifest in memory_of(tmp_path, memory).rglob("checkpoint.json"):
            flip(manifest)
    results = on_ranks(2, rescue, tmp_path, "01", 3)
    assert [result[:2] for result in results] == [(None, 0)] * 2
    assert "checkpoint.json" in results[0][2][0]
    assert not (tmp_path / "run/checkpoints").exists()


def rescue_beside_a_slow_rank(group: Group, folder: Path, nodes: str) -> tuple[Any, ...] | None:
    if group.rank == 1:  # three seconds pass whenever it looks at its clock
        checkpoint_format.time = SimpleNamespace(monotonic=count(0, 3).__next__)  # type: ignore[attr-defined]
    return rescue(group, folder, nodes, 1)


def test_a_slow_rank_goes_on_from_the_same_copy_as_the_others(tmp_path: Path) -> None:
    on_ranks(2, keep, tmp_path, "01", (2, 4))
    for node in (0, 1):
        for file in memory_of(tmp_path, node).rglob("step-00000004-*/tensors-00001-of-00002.safetensors"):
            file.unlink()
    results = on_ranks(2, rescue_beside_a_slow_rank, tmp_path, "01")
    assert [result[:2] for result in results] == [(2, 1)] * 2


def rescue_on_slow_disk(group: Group, folder: Path, nodes: str) -> tuple[Any, ...] | None:
    """A thousand bytes a second, waited for where they are synchronized; ranks wait for each other a second."""
    synced, fsync = Counter[int](), os.fsync

    def slowly(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".safetensors":
            time.sleep((status.st_size - synced[status.st_ino]) / 1000)
        synced[status.st_ino] = status.st_size
        fsync(descriptor)

    os.fsync, writing.COPY_BYTES = slowly, 100
    return rescue(replace(group, timeout_seconds=1).new_gloo_group(), folder, nodes)


def test_a_copy_that_takes_longer_than_ranks_wait_for_each_other_is_rescued(tmp_path: Path) -> None:
    """The second rank has nothing to copy."""
    on_ranks(1, keep, tmp_path, "0", (4,))
    assert on_ranks(2, rescue_on_slow_disk, tmp_path, "01") == [(4, 4, [])] * 2


def test_a_disk_that_spoils_what_is_copied_to_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    copy_file = handing_over.copy_file

    def spoiling(source: Path, target: Path) -> Iterator[None]:
        yield from copy_file(source, target)
        flip(target)

    monkeypatch.setattr(handing_over, "copy_file", spoiling)
    with pytest.raises(AssertionError, match=r"must read back as it was written, but does not; check the disk\."):
        on_ranks(2, rescue, tmp_path, "01")
    assert not list((tmp_path / "run/checkpoints").glob("*step-*"))
