"""Copies are kept where there is room for them, in a folder of the run's own, and only while they are needed."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megahead import host_memory
from megahead.checkpoints import memory as node_memory
from megahead.checkpoints.format import Snapshot
from megahead.checkpoints.memory import NodeMemory, Peers, ReplicaWriter
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from support.copied_state import ALONE, MARK, begin, wait
from support.named import without_digits
from support.node_memories import files_in, give_memory, leave_room
from support.on_ranks import on_ranks

NEEDED = 2 * (4 * 480 + 140)
"""Bytes that two copies take on each of two nodes: both ranks' shares."""


def keep_with_room(group: Group, folder: Path, room: int) -> list[str]:
    """With so much on one of two nodes."""
    memory = give_memory(folder, group.rank)
    if group.rank == 1:
        leave_room(room)
    copies = ReplicaWriter(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group)
    wait(copies)
    try:
        copies.can_start()
    except CheckpointError as error:
        copies.close()
        return [str(error), *map(str, memory.iterdir())]
    return files_in(memory)


def test_without_room_on_one_node_all_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    """There must be room for two copies at once, since the last one stays until the next is complete."""
    first, second = on_ranks(2, keep_with_room, tmp_path, NEEDED - 1)
    assert first == second
    (sentence,) = first
    assert re.search(
        r"^\S+ on \S+ must have room for 0.000 GiB of replicas, but has 0.000 GiB .*; make it larger", sentence
    )
    assert all(len(files) == 3 for files in on_ranks(2, keep_with_room, tmp_path, NEEDED))


CGROUPS = {
    "version 2, of a job": ("0::/slurm/job/step", "slurm/job", ("max", "current"), "inactive_file"),
    "version 1": ("4:cpu,memory:/job\n0::/", "memory/job", ("limit_in_bytes", "usage_in_bytes"), "total_active_file"),
    "version 1, in a container": ("4:memory:/docker/x", "memory", ("limit_in_bytes", "usage_in_bytes"), "total_cache"),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_a_job_has_room_within_its_own_limit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, folder, (limit, usage), cache = CGROUPS[kind]
    (tmp_path / "own").write_text(f"{own}\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, text in {limit: "4000000", usage: "3000000", "stat": f"pgfault 7\n{cache} 500000"}.items():
        (tmp_path / folder / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    assert host_memory.available_memory()[1] > 4_000_000
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    available = 1_000_000 if cache == "total_cache" else 1_500_000
    assert host_memory.available_memory() == (available, 4_000_000)
    NodeMemory(tmp_path).require_free_memory(available - 400_000)
    with pytest.raises(CheckpointError, match="of memory available"):
        NodeMemory(tmp_path).require_free_memory(available - 399_999)


def keep_on_a_node_that_fills_up(group: Group, folder: Path) -> tuple[str, list[str]]:
    memory = give_memory(folder, group.rank)
    if group.rank == 1:

        def no_room(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        node_memory.os.posix_fallocate = no_room  # type: ignore[assignment]
    copies = ReplicaWriter(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group)
    wait(copies)
    with pytest.raises(CheckpointError) as error:
        copies.can_start()
    copies.close()
    return str(error.value), files_in(memory)


def test_a_node_that_fills_up_before_anything_is_sent_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert on_ranks(2, keep_on_a_node_that_fills_up, tmp_path) == [("[Errno 28] No space left on device", [])] * 2


def test_a_session_that_is_over_removes_nothing_of_the_one_that_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "ROOT", tmp_path)
    memory = NodeMemory.of(RunFolder(tmp_path / "run"))
    first = ReplicaWriter(memory, "the first", ALONE)
    second = ReplicaWriter(memory, "the second", ALONE)
    for copies in (first, second):
        begin(copies, 2, ALONE)
        wait(copies)
    first.close()
    assert len(memory.replicas("the second")) == 1
    second.close()
    assert not memory.folder.exists()


def keep_what_is_bad(group: Group, folder: Path) -> str:
    give_memory(folder, group.rank)
    copies = ReplicaWriter(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group, bad=group.rank == 1)
    wait(copies)
    with pytest.raises(CheckpointError) as error:
        copies.can_start()
    return str(error.value)


def test_what_must_not_be_saved_is_not_kept_in_memory_either(tmp_path: Path) -> None:
    assert on_ranks(2, keep_what_is_bad, tmp_path) == ["numbers must be good."] * 2


def cancel_on_one_rank_first(group: Group, folder: Path) -> tuple[str | None, bool]:
    """Rank 0 cancels before it sends; rank 1, whose file has arrived, learns of it from rank 0."""
    give_memory(folder, group.rank)
    copies, write = ReplicaWriter(NodeMemory.of(RunFolder(folder / "run")), MARK, group), Snapshot.write

    def write_when_cancelled(snapshot: Snapshot, place: Path) -> Any:
        copies._cancelled.wait(20)
        return write(snapshot, place)

    if group.rank == 0:
        Snapshot.write = write_when_cancelled  # type: ignore[method-assign]
    begin(copies, 2, group)
    if group.rank == 0:
        copies._cancelled.set()
    assert copies._pending is not None
    return copies._pending.result(30), copies.can_start()


def test_a_copy_that_one_rank_cancels_first_is_no_error_on_the_others(tmp_path: Path) -> None:
    assert on_ranks(2, cancel_on_one_rank_first, tmp_path) == [(None, True)] * 2


def forget_one(group: Group, folder: Path) -> tuple[bool, list[str], list[str]]:
    """While it is on its way; then another can be kept."""
    memory = give_memory(folder, group.rank)
    copies = ReplicaWriter(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    write = Snapshot.write
    if group.rank == 1:

        def slowly(snapshot: Snapshot, place: Path) -> Any:
            copies._cancelled.wait(20)
            return write(snapshot, place)

        Snapshot.write = slowly  # type: ignore[method-assign]
    begin(copies, 6, group)
    busy = not copies.can_start()
    copies.discard()
    forgotten = files_in(memory)
    Snapshot.write = write  # type: ignore[method-assign]
    assert copies.can_start()
    begin(copies, 2, group)
    wait(copies)
    return busy, forgotten, files_in(memory)


def test_a_copy_that_is_on_its_way_keeps_others_from_beginning_and_can_be_forgotten(tmp_path: Path) -> None:
    for busy, forgotten, then in on_ranks(2, forget_one, tmp_path):
        assert busy
        assert forgotten == []
        assert {without_digits(file.split("/")[1]) for file in then} == {"step-00000002"}


def test_a_folder_of_another_user_or_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "ROOT", tmp_path)
    memory = NodeMemory.of(RunFolder(tmp_path / "run"))
    (tmp_path / "elsewhere/a").mkdir(parents=True)
    memory.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="must belong to this user"):
        memory.create()
    memory.remove()
    assert (tmp_path / "elsewhere/a").exists()
    memory.folder.unlink()
    memory.create()
    assert memory.folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: memory.folder.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match="must belong to this user"):
        memory.create()


def test_ranks_that_share_a_memory_share_a_node(tmp_path: Path) -> None:
    nodes = on_ranks(4, node_of, tmp_path)
    assert Peers(nodes).ranks_on(nodes[0]) == [0, 1]
    assert len(set(nodes)) == 2


def node_of(group: Group, folder: Path) -> str:
    give_memory(folder, group.rank // 2)
    return NodeMemory.of(RunFolder(folder / "run")).node()
