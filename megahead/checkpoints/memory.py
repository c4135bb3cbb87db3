"""Replicas of a run's state in the memory of other nodes: writing, verification, hand-over, recovery."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from megahead.background import submit
from megahead.checkpoints.disk import DiskStorage, Source, copy_newest_valid, find_checkpoint
from megahead.checkpoints.format import (
    FileEntry,
    Header,
    Manifest,
    Snapshot,
    check_files,
    run_long_on_all_ranks,
    run_on_all_ranks,
)
from megahead.checkpoints.reading import RecoveryResult, open_verified
from megahead.checkpoints.store import KeepRules, highest_first, step_of
from megahead.distributed.group import Group, exchange_bytes
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError
from megahead.files import fsync, read_if_exists, sha256_of
from megahead.remote_files import DamagedError
from megahead.run_folder import RunFolder
from megahead.wording import format_gib, pluralize

# Each rank sends its replica to a peer rank on the next node.


@dataclass(frozen=True)
class Peers:
    """The peers of all ranks, given each rank's node."""

    nodes: Sequence[str]

    def of(self, rank: int) -> int | None:
        """The peer of a rank, on the next node; None if there is only one node."""
        names = list(dict.fromkeys(self.nodes))
        if len(names) == 1:
            return None
        index = names.index(self.nodes[rank])
        next_ranks = self.ranks_on(names[(index + 1) % len(names)])
        return next_ranks[self.ranks_on(names[index]).index(rank) % len(next_ranks)]

    def senders_to(self, rank: int) -> list[int]:
        """The ranks whose peer is `rank`."""
        return [other_rank for other_rank in range(len(self.nodes)) if self.of(other_rank) == rank]

    def ranks_on(self, node: str) -> list[int]:
        """The ranks on a node."""
        return [rank for rank, other_node in enumerate(self.nodes) if other_node == node]


# Where a run's replicas are on a node: ROOT/megahead-NAME-HASH/MARK/rank-R/step-N-XXXXXX, with a checkpoint's files.


ROOT = Path("/dev/shm")
"""A file system in memory that all processes of a node share, and that outlives them."""

RESERVE = 0.1
"""Share of a node's memory that replicas leave free."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_OF_NAME = 60


@dataclass(frozen=True)
class NodeMemory:
    """The folder of one run in the memory of this node. It need not exist."""

    folder: Path

    @staticmethod
    def of(run: RunFolder) -> NodeMemory:
        """The memory folder of a run, unique to the path of the run folder."""
        path = run.path.resolve()
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
        return NodeMemory(ROOT / f"megahead-{path.name[:_MOST_OF_NAME]}-{digest}")

    @staticmethod
    def shared(run: RunFolder) -> NodeMemory:
        """The same layout on the shared disk, for replicas from nodes whose ranks do not train."""
        return NodeMemory(run / "handed-over")

    def node(self) -> str:
        """An identifier of the node: equal for ranks that share this memory."""
        try:
            boot, root = _BOOT.read_text(encoding="ascii").strip(), self.folder.parent.stat()
        except OSError:
            return socket.gethostname()
        return f"{boot} {root.st_dev} {root.st_ino}"

    def rank_folder(self, session_id: str, rank: int) -> Path:
        """Where a rank of the session with that id keeps its replicas."""
        return self._session(session_id) / f"rank-{rank:05d}"

    def replicas(self, session_id: str) -> list[Path]:
        """The complete folders of all ranks of that session on this node."""
        rank_folders = sorted(self._session(session_id).glob("rank-*")) if self._is_owned() else []
        return [
            rank_folder / name
            for rank_folder in rank_folders
            for name in highest_first(DiskStorage(rank_folder).names())
        ]

    def create(self) -> None:
        """Makes the folder, which only this user may read; CheckpointError if it is another's."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_owned():
            raise CheckpointError(f"`{self.folder}` must belong to this user, but does not; remove it.")

    def require_free_memory(self, num_bytes: int) -> None:
        """CheckpointError unless the node has memory for `num_bytes` more."""
        memory = psutil.virtual_memory()
        free_shared = shutil.disk_usage(ROOT).free
        available = max(0, min(free_shared, int(memory.available - RESERVE * memory.total)))
        if num_bytes > available:
            raise CheckpointError(
                f"{ROOT} on {socket.gethostname()} must have room for {format_gib(num_bytes, 3)} of copies, but has "
                f"{format_gib(available, 3)} ({format_gib(free_shared, 3)} free there, "
                f"{format_gib(memory.available, 3)} of memory available); make it larger, or leave "
                "training.replicate_every out."
            )

    def remove(self, session_id: str | None = None) -> None:
        """All replicas of the run on this node, or those of the session with that id."""
        if self._is_owned():
            shutil.rmtree(self.folder if session_id is None else self._session(session_id), ignore_errors=True)
            with suppress(OSError):  # other sessions' replicas remain
                self.folder.rmdir()

    def _session(self, session_id: str) -> Path:
        return self.folder / hashlib.sha256(session_id.encode()).hexdigest()[:16]

    def _is_owned(self) -> bool:
        """Whether the folder exists, is no link, and belongs to this user: anyone may write to ROOT."""
        with suppress(OSError):
            status = self.folder.lstat()
            return status.st_uid == os.geteuid() and self.folder.is_dir() and not self.folder.is_symlink()
        return False


# The replicas of a session on the remaining nodes, every byte verified.


class ReplicaSource(Source):
    """The replicas newer than step `than`. Each rank writes some of the files on its node. Made by all ranks at once.

    Ranks of one node verify a share each of its files; what others put on disk counts as on the first rank's node.
    """

    def __init__(self, session_id: str, newer_than: int, run: RunFolder, group: Group) -> None:
        self._rank = group.rank
        self._manifests: dict[str, Manifest] = {}
        self._valid_files: dict[str, dict[str, Path]] = {}
        self.problems: list[str] = []
        """A sentence for each damaged replica, on any node."""
        memory, shared = NodeMemory.of(run), NodeMemory.shared(run)
        nodes = group.all_gather_objects(memory.node())
        node_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        folders = memory.replicas(session_id) + (shared.replicas(session_id) if node_ranks[0] == 0 else [])
        files = [file for folder in folders if step_of(folder) > newer_than for file in self._list_files(folder)]
        run_long_on_all_ranks(group, self._verify(files[node_ranks.index(group.rank) :: len(node_ranks)]))
        self.problems = list(
            dict.fromkeys(problem for rank in group.all_gather_objects(self.problems) for problem in rank)
        )
        valid_files_by_rank = group.all_gather_objects(
            {replica: set(files) for replica, files in self._valid_files.items()}
        )
        self._writers: dict[str, dict[str, int]] = {}
        for replica in highest_first({replica for valid_files in valid_files_by_rank for replica in valid_files}):
            holders = [rank for rank, valid_files in enumerate(valid_files_by_rank) if replica in valid_files]
            self._writers[replica] = {
                name: rank for rank in reversed(holders) for name in valid_files_by_rank[rank][replica]
            }
            manifest = self._manifests[replica] if group.rank == holders[0] else None
            (self._manifests[replica],) = filter(None, group.all_gather_objects(manifest))
        self._remaining = iter(self._writers)

    def _list_files(self, folder: Path) -> list[Path]:
        """The files of a replica that this node has."""
        try:
            self._manifests[folder.name] = Manifest.read(folder)
        except CheckpointError as error:
            self.problems.append(str(error))
            return []
        return [folder / name for name in self._manifests[folder.name].files if (folder / name).exists()]

    def _verify(self, files: Iterable[Path]) -> Iterator[None]:
        for path in files:
            replica, name = path.parent.name, path.name
            try:
                yield from check_files(path.parent, {name: self._manifests[replica].files[name]})
            except CheckpointError as error:
                self.problems.append(str(error))
            else:
                self._valid_files.setdefault(replica, {})[name] = path

    def choose(self) -> Generator[None, None, tuple[str | None, int]]:
        self._chosen = next(self._remaining, "")
        if not self._chosen:
            return None, 0
        manifest = self._manifests[self._chosen]
        missing_files = [name for name in manifest.files if name not in self._writers[self._chosen]]
        if missing_files:
            raise DamagedError(
                f"a copy in memory must be whole to be used, but of that of step {manifest.step:,} "
                f"{missing_files[0]} is on no node that is here."
            )
        yield  # not before: a rank that had come no further would be one replica behind the others
        return self._chosen, manifest.total_bytes

    def write(self, partial: Path) -> Iterator[None]:
        for name, path in self._valid_files.get(self._chosen, {}).items():
            if self._writers[self._chosen][name] == self._rank:
                shutil.copyfile(path, partial / name)
                (partial / name).chmod(partial.stat().st_mode & 0o666)
                fsync(partial / name)
                try:
                    yield from check_files(partial, {name: self._manifests[self._chosen].files[name]})
                except CheckpointError:
                    raise CheckpointError(
                        f"`{partial / name}` must read back as it was written, but does not; check the disk."
                    ) from None

    def seal(self, partial: Path, results: list[Any]) -> None:
        self._manifests[self._chosen].write(partial)


# How ranks get replicas from nodes whose ranks do not train: these put them into the run's folder, which all share.


WAIT_SECONDS = 30.0
"""How long training ranks wait for the replicas of spare ranks."""


def share_replicas(folder: RunFolder, launch: Launch) -> None:
    """Called by a rank beyond those that train: what is on its node of the last session's replicas, newer than
    the checkpoints on disk, is put into the run's folder, if there is room. Others look for it there."""
    session_id = last_session_id(folder)
    if session_id is None:
        return
    newest_on_disk = find_checkpoint(folder.path)
    shared = NodeMemory.shared(folder)
    with suppress(OSError):
        for replica in NodeMemory.of(folder).replicas(session_id):
            rank_folder = shared.rank_folder(session_id, launch.rank).with_name(
                f"rank-{launch.rank:05d}-of-{replica.parent.name}"
            )
            is_newer = newest_on_disk is None or step_of(replica) > step_of(newest_on_disk)
            if is_newer and not (rank_folder / replica.name).exists():
                partial_folder = DiskStorage(rank_folder).partial(replica.name)
                shutil.rmtree(partial_folder, ignore_errors=True)
                shutil.copytree(replica, partial_folder)
                partial_folder.rename(rank_folder / replica.name)
        done_file = _done_file(shared, session_id, launch, launch.rank)
        done_file.parent.mkdir(parents=True, exist_ok=True)
        done_file.touch()


def wait_for_spare_ranks(folder: RunFolder, session_id: str, launch: Launch, max_seconds: float) -> None:
    """Waits until all spare ranks have shared their replicas, at most WAIT_SECONDS."""
    deadline = time.monotonic() + min(WAIT_SECONDS, max_seconds)
    for rank in range(launch.world_size, launch.world_size + launch.spare_ranks):
        done_file = _done_file(NodeMemory.shared(folder), session_id, launch, rank)
        while not done_file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def last_session_id(folder: RunFolder) -> str | None:
    """The id of the last session; None if it ended normally."""
    content = read_if_exists(folder.session)
    return None if content is None else content.decode()


def _done_file(shared: NodeMemory, session_id: str, launch: Launch, rank: int) -> Path:
    """A marker file: the rank has shared its replicas in this rendezvous."""
    rendezvous = sha256(f"{launch.address} {launch.port} {launch.attempt}".encode()).hexdigest()[:16]
    return shared.rank_folder(session_id, rank).with_name(f"done-{rendezvous}-{rank}")


# Keeps a replica of the run's state in memory while training goes on.


DISCARD_SECONDS = 5.0
"""How long to wait for a cancelled replica."""


class ReplicaWriter:
    """The replicas of one session. Made by all ranks of `world_group` at once; `close` alone is not collective over it.

    There are two at most: the last one is removed on no rank before the next is complete on all. Making it removes
    those of earlier sessions, whose state is on disk by then.
    """

    def __init__(self, memory: NodeMemory, session_id: str, world_group: Group) -> None:
        memory.remove()
        self._memory, self._session_id = memory, session_id
        self._disk = DiskStorage(memory.rank_folder(session_id, world_group.rank))
        self._world_group, self._group = world_group, world_group.new_gloo_group()
        self.peers = Peers(world_group.all_gather_objects(memory.node()))
        self._pending: Future[str | None] | None = None
        self._cancelled = threading.Event()

    def can_start(self) -> bool:
        """Whether the last copy is complete on all ranks, so that another can begin; CheckpointError on all if it
        failed on one. Then older ones are removed."""
        pending = self._pending
        is_done = pending is None or pending.done()
        error = pending.exception() if pending is not None and is_done else None
        votes = torch.tensor([not is_done, error is not None], dtype=torch.int32)
        is_busy, has_failed = self._world_group.all_reduce_max_(votes).tolist()
        if has_failed:
            message = None if error is None else str(error) or type(error).__name__
            error_message = next(filter(None, self._world_group.all_gather_objects(message)))
            raise CheckpointError(error_message.partition("\n")[0])  # without the stacks that torch appends
        if not is_busy and pending is not None:
            complete = pending.result()
            for name in self._disk.names():
                if complete is not None and name != complete:
                    self._disk.remove(name)
        return not is_busy

    def start(self, header: Header, snapshot: Snapshot, check: Callable[[], None]) -> None:
        """Begins a replica in a thread; only after `can_start`. It has the name and the parents that it would have on
        disk. `check` raises if it must not be kept."""
        self._cancelled = threading.Event()
        self._pending = submit(partial(self._write, header, snapshot, check, self._cancelled))

    def discard(self, timeout: float = DISCARD_SECONDS) -> None:
        """Removes all: the run goes on from another state. One that is on its way ends soon, and is not kept; it is
        waited for `timeout` seconds at most."""
        self._cancelled.set()
        if self._pending is not None:
            with suppress(TimeoutError):
                self._pending.exception(timeout)
        shutil.rmtree(self._disk.root, ignore_errors=True)

    def close(self, timeout: float = DISCARD_SECONDS) -> None:
        """Removes all replicas of this session from this node's memory."""
        self.discard(timeout)
        self._memory.remove(self._session_id)

    def _write(
        self, header: Header, snapshot: Snapshot, check: Callable[[], None], cancelled: threading.Event
    ) -> str | None:
        """Writes a replica; returns its name, or None if it was cancelled."""
        group, folder = self._group, self._disk.partial(header.name)
        try:
            run_on_all_ranks(group, lambda: self._prepare(folder, snapshot, check))
            entries = run_on_all_ranks(group, lambda: snapshot.write(folder))
            files = dict(zip(snapshot.file_names, entries, strict=True))
            common_header = group.broadcast_object(header)
            self._exchange(folder, files, cancelled)
            common_header.manifest(snapshot.entries, files).write(folder)
            if not cancelled.is_set():
                self._disk.publish(header.name)
        except Exception:
            if not cancelled.is_set():
                raise
        return None if cancelled.is_set() else header.name

    def _prepare(self, folder: Path, snapshot: Snapshot, check: Callable[[], None]) -> None:
        check()
        self._memory.create()
        shutil.rmtree(folder, ignore_errors=True)
        error_message = not self._disk.names()
        node_ranks = self.peers.ranks_on(self.peers.nodes[self._group.rank])
        stored_ranks = [*node_ranks, *(other_rank for rank in node_ranks for other_rank in self.peers.senders_to(rank))]
        self._memory.require_free_memory(
            (2 if error_message else 1) * sum(snapshot.bytes_by_rank[rank] for rank in stored_ranks)
        )
        folder.mkdir(parents=True)

    def _exchange(self, folder: Path, files: dict[str, FileEntry], cancelled: threading.Event) -> None:
        """Sends this rank's file to its peer, and receives the files of the ranks whose peer it is."""
        rank, names, received = self._group.rank, list(files), dict[int, Tensor]()
        peer = self.peers.of(rank)
        if peer is None:
            return
        sender_files = {other_rank: names[other_rank] for other_rank in self.peers.senders_to(rank)}

        def allocate_files() -> None:
            received.update(
                {other_rank: _allocate(folder / name, files[name].bytes) for other_rank, name in sender_files.items()}
            )

        run_on_all_ranks(self._group, allocate_files)
        sent = torch.from_file(str(folder / names[rank]), size=files[names[rank]].bytes, dtype=torch.uint8)
        if not exchange_bytes(self._group, sent, peer, received, cancelled.is_set):
            raise CheckpointError("a copy must be complete to be kept, but was ended before.")
        for name in sender_files.values():
            if sha256_of(folder / name) != files[name].sha256:
                raise CheckpointError(f"`{folder / name}` must arrive as it was sent, but did not; check the network.")


def _allocate(path: Path, size: int) -> Tensor:
    """uint8 [size]: the bytes of a new file. Its room is taken at once, since a write to a place in memory that turns
    out to be missing would end the process."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


# What was in memory only becomes a checkpoint again: the newest replica that is whole on the nodes that are there.


def recover_newer(
    newer_than: int, folder: RunFolder, launch: Launch, group: Group, rules: KeepRules
) -> RecoveryResult | None:
    """Makes a checkpoint in `folder` of the newest whole replica, if one of the last session is newer than step `than`;
    None if there is none. Collective; CheckpointError where the disk cannot take it.

    Which session was the last one, the id in its folder says: once another has begun, or it has ended by
    itself, its replicas are worthless. Every file is verified where it lies, and each rank writes some of those on its
    node.
    """
    start_time = time.monotonic()
    session_id = group.broadcast_object(last_session_id(folder) if group.rank == 0 else None)
    if session_id is None:
        return None
    wait_for_spare_ranks(folder, session_id, launch, group.timeout_seconds / 2)
    source, disk = ReplicaSource(session_id, newer_than, folder, group), DiskStorage(folder.checkpoints)
    name, damaged = copy_newest_valid(source, disk, group, rules)
    problems = [*source.problems, *damaged]
    if name is None:
        return RecoveryResult("memory", None, problems) if problems else None
    checkpoint = open_verified(disk.root / name, group)
    newer_by, seconds = checkpoint.step - max(newer_than, 0), time.monotonic() - start_time
    message = f"step {checkpoint.step:,}, {pluralize(newer_by, 'step')} newer than the disk's"
    details = {"newer_by": newer_by, "rescue_seconds": round(seconds, 3)}
    return RecoveryResult("memory", checkpoint, problems, f"{message}: saved as {name} in {seconds:.1f} s", details)
