"""Keeps a copy of the run's state in memory while training goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahead.checkpoint import Snapshot, run_on_all_ranks
from megahead.checkpoint.folders import partial_folder, step_folder, step_of, steps_in
from megahead.checkpoint.manifest import FileEntry, Manifest
from megahead.copies.keepers import Keepers
from megahead.copies.node_memory import NodeMemory
from megahead.distributed import Group, pass_on
from megahead.errors import CheckpointError
from megahead.files import sha256_of

PATIENCE_SECONDS = 5.0
"""How long a copy that is not needed any more is waited for."""

PARENT_STEP = "parent_step"
"""Where it is in a copy's state; a checkpoint's has none."""


@dataclass(frozen=True)
class Copy:
    """What a copy is made of."""

    step: int
    snapshot: Snapshot
    check: Callable[[], None]
    """Raises if it must not be kept."""

    state: dict[str, Any]
    config: dict[str, Any]

    parent_step: int
    """As a checkpoint's."""


class MemoryCopies:
    """The copies of one session. Made by all ranks of `world_group` at once; `close` alone is not collective over it.

    There are two at most: the last one is removed on no rank before the next is complete on all. Making it removes
    those of earlier sessions, whose state is on disk by then.
    """

    def __init__(self, memory: NodeMemory, mark: str, world_group: Group) -> None:
        memory.remove()
        self._memory, self._mark, self._slot = memory, mark, memory.slot(mark, world_group.rank)
        self._world_group, self._group = world_group, world_group.side_channel()
        self.keepers = Keepers(world_group.all_gather_objects(memory.node()))
        self._pending: Future[int | None] | None = None
        self._ends = threading.Event()

    def may_begin(self) -> bool:
        """Whether the last copy is complete on all ranks, so that another can begin; CheckpointError on all if it
        failed on one. Then older ones are removed."""
        pending = self._pending
        over = pending is None or pending.done()
        error = pending.exception() if pending is not None and over else None
        votes = torch.tensor([not over, error is not None], dtype=torch.int32)
        busy, failed = self._world_group.all_reduce_max_(votes).tolist()
        if failed:
            sentences = self._world_group.all_gather_objects(None if error is None else _first_line(error))
            raise CheckpointError(next(filter(None, sentences)))
        if not busy and pending is not None:
            step = pending.result()
            for folder in steps_in(self._slot):
                if step is not None and step_of(folder) != step:
                    shutil.rmtree(folder)
        return not busy

    def begin(self, copy: Copy) -> None:
        """Begins a copy in a thread; only after `may_begin`."""
        self._ends, self._pending = threading.Event(), Future()
        threading.Thread(target=_fulfil, args=(self._pending, self._keep, copy, self._ends), daemon=True).start()

    def forget(self, patience: float = PATIENCE_SECONDS) -> None:
        """Removes all: the run goes on from another state. One that is on its way ends soon, and is not kept; it is
        waited for `patience` seconds at most."""
        self._ends.set()
        if self._pending is not None:
            with suppress(TimeoutError):
                self._pending.exception(patience)
        shutil.rmtree(self._slot, ignore_errors=True)

    def close(self, patience: float = PATIENCE_SECONDS) -> None:
        """Leaves nothing of this session in this node's memory."""
        self.forget(patience)
        self._memory.remove(self._mark)

    def _keep(self, copy: Copy, ends: threading.Event) -> int | None:
        """The step, or None if it was not to be kept any more."""
        try:
            self._write(copy, ends)
        except Exception:
            if ends.is_set():
                return None
            raise
        return None if ends.is_set() else copy.step

    def _write(self, copy: Copy, ends: threading.Event) -> None:
        group, snapshot = self._group, copy.snapshot
        folder, final = partial_folder(self._slot, copy.step), step_folder(self._slot, copy.step)
        run_on_all_ranks(group, lambda: self._prepare(folder, copy))
        entries = run_on_all_ranks(group, lambda: snapshot.write(folder))
        files = dict(zip(snapshot.file_names, entries, strict=True))
        state = group.broadcast_object(copy.state | {PARENT_STEP: copy.parent_step})
        self._exchange(folder, files, ends)
        Manifest(step=copy.step, state=state, config=copy.config, tensors=snapshot.entries, files=files).write(folder)
        if not ends.is_set():
            folder.rename(final)

    def _prepare(self, folder: Path, copy: Copy) -> None:
        copy.check()
        self._memory.make()
        shutil.rmtree(folder, ignore_errors=True)
        first = not any(steps_in(self._slot))
        here = self.keepers.on(self.keepers.nodes[self._group.rank])
        kept = [*here, *(ward for rank in here for ward in self.keepers.wards(rank))]
        self._memory.require_room((2 if first else 1) * sum(copy.snapshot.bytes_of[rank] for rank in kept))
        folder.mkdir(parents=True)

    def _exchange(self, folder: Path, files: dict[str, FileEntry], ends: threading.Event) -> None:
        """Sends this rank's file to its keeper, and receives its wards'."""
        rank, names, theirs = self._group.rank, list(files), dict[int, Tensor]()
        keeper = self.keepers.of(rank)
        if keeper is None:
            return
        wards = {ward: names[ward] for ward in self.keepers.wards(rank)}

        def make_places() -> None:
            theirs.update({ward: _place_for(folder / name, files[name].bytes) for ward, name in wards.items()})

        run_on_all_ranks(self._group, make_places)
        mine = torch.from_file(str(folder / names[rank]), size=files[names[rank]].bytes, dtype=torch.uint8)
        if not pass_on(self._group, mine, keeper, theirs, ends.is_set):
            raise CheckpointError("a copy must be complete to be kept, but was ended before.")
        for name in wards.values():
            if sha256_of(folder / name) != files[name].sha256:
                raise CheckpointError(f"`{folder / name}` must arrive as it was sent, but did not; check the network.")


def _place_for(path: Path, size: int) -> Tensor:
    """uint8 [size]: the bytes of a new file. Its room is taken at once, since a write to a place in memory that turns
    out to be missing would end the process."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    """Without the stacks that torch appends."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _fulfil(future: Future[int | None], function: Callable[..., int | None], *args: Any) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
