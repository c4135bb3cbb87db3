"""A small state, kept in memory by ranks as if on nodes, rescued there, and saved on disk to be held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megahead.checkpoints.format import Header, Snapshot
from megahead.checkpoints.memory import NodeMemory, ReplicaWriter, recover_replica
from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.store import RetentionRules, new_checkpoint_name
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.distributed.tensors import RoundRobinShard
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from support.node_memories import files_in, give_memory
from support.on_ranks import on_ranks
from support.saved import save_checkpoint

MARK = "a session"
ALONE = Group()


def tensors(step: int, group: Group) -> list[tuple[str, torch.Tensor | RoundRobinShard]]:
    rows = torch.arange(35.0).view(7, 5) * step
    plain = [(f"weight/{i}", torch.full((40, 3), float(step * i))) for i in range(4)]
    return [*plain, ("late/weight/rows", RoundRobinShard(rows[group.rank :: group.size].clone(), 7))]


def begin(copies: ReplicaWriter, step: int, group: Group, bad: bool = False) -> None:
    def check() -> None:
        if bad:
            raise CheckpointError("numbers must be good.")

    snapshot = Snapshot.take(tensors(step, group), group, copied=True)
    name = group.broadcast_object(new_checkpoint_name(step))
    header = Header(name, step, {"step": step, "seconds": 0.5 + group.rank}, {"name": "x"})
    copies.start(header, snapshot, check)


def wait(copies: ReplicaWriter) -> None:
    assert copies._pending is not None
    copies._pending.exception(30)


def keep(group: Group, folder: Path, nodes: str, steps: tuple[int, ...], mark: str = MARK) -> list[str]:
    """A session that keeps copies of these steps, waits for each, and is killed; what lies on its node then."""
    memory = give_memory(folder, int(nodes[group.rank]))
    run = RunFolder(folder / "run")
    copies = ReplicaWriter(NodeMemory.of(run), mark, group)
    for step in steps:
        assert copies.can_start()
        begin(copies, step, group)
        wait(copies)
    group.all_gather_objects(None)
    run.path.mkdir(exist_ok=True)
    run.session.write_text(mark)
    return files_in(memory)


def rescue(group: Group, folder: Path, nodes: str, than: int = -1, waiting: int = 0) -> tuple[Any, ...] | None:
    """On nodes that are left."""
    give_memory(folder, int(nodes[group.rank]))
    run = RunFolder(folder / "run")
    came = recover_replica(than, run, Launch(spare_ranks=waiting, world_size=group.size), group, RetentionRules(2))
    if came is None:
        return None
    return None if came.checkpoint is None else came.checkpoint.step, came.details.get("newer_by", 0), came.problems


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
    save_checkpoint(folder / "disk", step, tensors(step, group), state=state, config=config, group=group)
