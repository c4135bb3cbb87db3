"""Copies in the memory of nodes: what of them is left after a node is lost becomes the checkpoint that it would have
been, or is refused with a sentence."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoint import KeepRules, Snapshot, open_checkpoint, save_checkpoint
from megahead.copies import Copy, MemoryCopies, NodeMemory, hand_over, handing_over, keeping, node_memory, rescue_newer
from megahead.copies.keepers import Keepers
from megahead.distributed import Group, Launch, RowShard
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from support.node_memories import files_in, give_memory, leave_room, memory_of
from support.on_ranks import on_ranks

MARK = "a session"
ALONE = Group()


def tensors(step: int, group: Group) -> list[tuple[str, torch.Tensor | RowShard]]:
    rows = torch.arange(35.0).view(7, 5) * step
    plain = [(f"weight/{i}", torch.full((40, 3), float(step * i))) for i in range(4)]
    return [*plain, ("late/weight/rows", RowShard(rows[group.rank :: group.size].clone(), 7))]


def begin(copies: MemoryCopies, step: int, group: Group, bad: bool = False) -> None:
    def check() -> None:
        if bad:
            raise CheckpointError("numbers must be good.")

    snapshot = Snapshot.take(tensors(step, group), group, copied=True)
    copies.begin(Copy(step, snapshot, check, {"step": step, "seconds": 0.5 + group.rank}, {"name": "x"}, step - 2))


def wait(copies: MemoryCopies) -> None:
    assert copies._pending is not None
    copies._pending.exception(30)


def keep(group: Group, folder: Path, nodes: str, steps: tuple[int, ...], mark: str = MARK) -> list[str]:
    """A session that keeps copies of these steps, waits for each, and is killed; what lies on its node then."""
    memory = give_memory(folder, int(nodes[group.rank]))
    run = RunFolder(folder / "run")
    copies = MemoryCopies(NodeMemory.of(run), mark, group)
    for step in steps:
        assert copies.may_begin()
        begin(copies, step, group)
        wait(copies)
    group.barrier()
    run.path.mkdir(exist_ok=True)
    run.holder.write_text(mark)
    return files_in(memory)


def rescue(group: Group, folder: Path, nodes: str, than: int = -1, waiting: int = 0) -> tuple[Any, ...] | None:
    """On nodes that are left."""
    give_memory(folder, int(nodes[group.rank]))
    run = RunFolder(folder / "run")
    came = rescue_newer(than, run, Launch(spare_ranks=waiting, world_size=group.size), group, 2, KeepRules())
    if came is None:
        return None
    return None if came.checkpoint is None else came.checkpoint.step, came.newer_by, came.problems


def same_as_on_disk(folder: Path, step: int, ranks: int) -> bool:
    """Whether the checkpoint that was rescued is the one that would have been saved."""
    on_ranks(ranks, save, folder, step)
    saved, rescued = open_checkpoint(folder / "disk"), open_checkpoint(folder / "run")
    rescued.verify()
    assert saved.files == rescued.files
    assert saved.state == rescued.state | {"seconds": 0.5}
    return all(torch.equal(saved.read(name), rescued.read(name)) for name in saved.tensors)


def save(group: Group, folder: Path, step: int) -> None:
    state, config = {"step": step, "seconds": 0.5}, {"name": "x"}
    save_checkpoint(folder / "disk", step, tensors(step, group), state=state, config=config, group=group, keep=1)


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
        steps = {file.split("/")[1] for file in files}
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
    assert {file.split("/")[1] for files in there for file in files} == {"step-00000002"}


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
    hand_over(RunFolder(folder / "run"), launch)


def test_nodes_whose_ranks_only_wait_hand_over_what_the_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four nodes the last is lost, and two can train: on these the third's file is missing."""
    on_ranks(4, keep, tmp_path, "0123", (4,))
    shutil.rmtree(memory_of(tmp_path, 3))
    shutil.move(memory_of(tmp_path, 0), memory_of(tmp_path, 4))  # ranks are numbered anew
    on_ranks(1, hand, tmp_path, Launch(rank=4, world_size=2, spare_ranks=1, port=1))
    monkeypatch.setattr(handing_over, "PATIENCE_SECONDS", 0.2)
    assert on_ranks(2, rescue, tmp_path, "12") == [(4, 4, [])] * 2
    assert same_as_on_disk(tmp_path, 4, 4)


def test_those_that_wait_are_waited_for_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2, keep, tmp_path, "01", (4,))
    monkeypatch.setattr(handing_over, "PATIENCE_SECONDS", 0.5)
    began = time.monotonic()
    assert on_ranks(1, rescue, tmp_path, "0", -1, 2) == [(4, 4, [])]
    assert time.monotonic() - began >= 0.5


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SPOILED = {
    "flipped": (flip, "must match its checksum, but does not"),
    "cut short": (cut, "must match its checksum, but does not"),
    "gone": (Path.unlink, "a copy in memory must be whole to be used, but of that of step 4 tensors-00001-of-00002"),
}


@pytest.mark.parametrize("damage", SPOILED)
def test_a_spoiled_copy_is_passed_over_with_a_sentence(tmp_path: Path, damage: str) -> None:
    on_ranks(2, keep, tmp_path, "01", (2, 4))
    shutil.rmtree(memory_of(tmp_path, 1))
    spoil, says = SPOILED[damage]
    (mine,) = memory_of(tmp_path, 0).rglob("step-00000004/tensors-00001-of-00002.safetensors")
    spoil(mine)
    ((step, newer_by, problems),) = on_ranks(1, rescue, tmp_path, "0", 1)
    assert (step, newer_by) == (2, 1)
    assert says in " ".join(problems)
    assert "tensors-00001-of-00002.safetensors is on no node that is here" in problems[-1]


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


NEEDED = 2 * (4 * 480 + 140)
"""Bytes that two copies take on each of two nodes: both ranks' shares."""


def keep_with_room(group: Group, folder: Path, room: int) -> list[str]:
    """With so much on one of two nodes."""
    memory = give_memory(folder, group.rank)
    if group.rank == 1:
        leave_room(room)
    copies = MemoryCopies(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group)
    wait(copies)
    try:
        copies.may_begin()
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
        r"^\S+ on \S+ must have room for 0.000 GiB of copies, but has 0.000 GiB .*; make it larger", sentence
    )
    assert all(len(files) == 3 for files in on_ranks(2, keep_with_room, tmp_path, NEEDED))


def keep_on_a_node_that_fills_up(group: Group, folder: Path) -> tuple[str, list[str]]:
    memory = give_memory(folder, group.rank)
    if group.rank == 1:

        def no_room(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        keeping.os.posix_fallocate = no_room  # type: ignore[assignment]
    copies = MemoryCopies(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group)
    wait(copies)
    with pytest.raises(CheckpointError) as error:
        copies.may_begin()
    copies.close()
    return str(error.value), files_in(memory)


def test_a_node_that_fills_up_before_anything_is_sent_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert on_ranks(2, keep_on_a_node_that_fills_up, tmp_path) == [("[Errno 28] No space left on device", [])] * 2


def test_a_session_that_is_over_removes_nothing_of_the_one_that_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "ROOT", tmp_path)
    memory = NodeMemory.of(RunFolder(tmp_path / "run"))
    first = MemoryCopies(memory, "the first", ALONE)
    second = MemoryCopies(memory, "the second", ALONE)
    for copies in (first, second):
        begin(copies, 2, ALONE)
        wait(copies)
    first.close()
    assert len(memory.copies("the second")) == 1
    second.close()
    assert not memory.folder.exists()


def keep_what_is_bad(group: Group, folder: Path) -> str:
    give_memory(folder, group.rank)
    copies = MemoryCopies(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    begin(copies, 2, group, bad=group.rank == 1)
    wait(copies)
    with pytest.raises(CheckpointError) as error:
        copies.may_begin()
    return str(error.value)


def test_what_must_not_be_saved_is_not_kept_in_memory_either(tmp_path: Path) -> None:
    assert on_ranks(2, keep_what_is_bad, tmp_path) == ["numbers must be good."] * 2


def forget_one(group: Group, folder: Path) -> tuple[bool, list[str], list[str]]:
    """While it is on its way; then another can be kept."""
    memory = give_memory(folder, group.rank)
    copies = MemoryCopies(NodeMemory.of(RunFolder(folder / "run")), MARK, group)
    write = Snapshot.write
    if group.rank == 1:

        def slowly(snapshot: Snapshot, place: Path) -> Any:
            copies._ends.wait(20)
            return write(snapshot, place)

        Snapshot.write = slowly  # type: ignore[method-assign]
    begin(copies, 6, group)
    busy = not copies.may_begin()
    copies.forget()
    forgotten = files_in(memory)
    Snapshot.write = write  # type: ignore[method-assign]
    assert copies.may_begin()
    begin(copies, 2, group)
    wait(copies)
    return busy, forgotten, files_in(memory)


def test_a_copy_that_is_on_its_way_keeps_others_from_beginning_and_can_be_forgotten(tmp_path: Path) -> None:
    for busy, forgotten, then in on_ranks(2, forget_one, tmp_path):
        assert busy
        assert forgotten == []
        assert {file.split("/")[1] for file in then} == {"step-00000002"}


def test_a_folder_of_another_user_or_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "ROOT", tmp_path)
    memory = NodeMemory.of(RunFolder(tmp_path / "run"))
    (tmp_path / "elsewhere/a").mkdir(parents=True)
    memory.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="must belong to this user"):
        memory.make()
    memory.remove()
    assert (tmp_path / "elsewhere/a").exists()
    memory.folder.unlink()
    memory.make()
    assert memory.folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: memory.folder.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match="must belong to this user"):
        memory.make()


def test_ranks_that_share_a_memory_share_a_node(tmp_path: Path) -> None:
    nodes = on_ranks(4, node_of, tmp_path)
    assert Keepers(nodes).on(nodes[0]) == [0, 1]
    assert len(set(nodes)) == 2


def node_of(group: Group, folder: Path) -> str:
    give_memory(folder, group.rank // 2)
    return NodeMemory.of(RunFolder(folder / "run")).node()
