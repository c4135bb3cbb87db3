"""Replicas of a run's state in the memory of other nodes: writing, verification, recovery."""

from __future__ import annotations

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
    run_generator_on_all_ranks,
    run_on_all_ranks,
)
from megahead.checkpoints.reading import RecoveryResult, open_verified
from megahead.checkpoints.store import RetentionRules, highest_step_first, step_of
from megahead.distributed.group import Group, exchange_bytes
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError
from megahead.files import copy_file, read_if_exists, sha256_of, wait_until_visible
from megahead.host_memory import available_memory
from megahead.remote_files import DamagedError
from megahead.run_folder import RunFolder
from megahead.wording import format_gib, pluralize


@dataclass(frozen=True)
class Peers:
    """The peers to which ranks send their replicas, given each rank's node."""

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


# The replicas of a run on a node: ROOT/megahead-NAME-HASH/SESSION/rank-R/step-N-XXXXXX, with a checkpoint's files.


ROOT = Path("/dev/shm")
"""A file system in memory that a node's processes share, and that outlives them."""

RESERVE = 0.1
"""Share of the memory that replicas leave free."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MAX_NAME_LENGTH = 60


@dataclass(frozen=True)
class NodeMemory:
    """The folder of a run in the memory of this node. It need not exist."""

    folder: Path

    @staticmethod
    def of(run: RunFolder) -> NodeMemory:
        """The memory folder of a run, unique to the path of the run folder."""
        path = run.path.resolve()
        digest = sha256(os.fsencode(path)).hexdigest()[:12]
        return NodeMemory(ROOT / f"megahead-{path.name[:_MAX_NAME_LENGTH]}-{digest}")

    @staticmethod
    def on_shared_disk(run: RunFolder) -> NodeMemory:
        """The folder of the replicas that spare ranks have copied into the run's folder, with the same layout."""
        return NodeMemory(run / "handed-over")

    def node(self) -> str:
        """An identifier of the node: equal for ranks that share this memory."""
        try:
            boot, root = _BOOT.read_text(encoding="ascii").strip(), self.folder.parent.stat()
        except OSError:
            return socket.gethostname()
        return f"{boot} {root.st_dev} {root.st_ino}"

    def rank_folder(self, session_id: str, rank: int) -> Path:
        """The folder of a rank's replicas."""
        return self._session(session_id) / f"rank-{rank:05d}"

    def replicas(self, session_id: str) -> list[Path]:
        """The complete replicas of a session on this node."""
        rank_folders = sorted(self._session(session_id).glob("rank-*")) if self._is_owned() else []
        return [
            rank_folder / name
            for rank_folder in rank_folders
            for name in highest_step_first(DiskStorage(rank_folder).names())
        ]

    def create(self) -> None:
        """Creates the folder, readable by this user only; CheckpointError if another user owns it."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_owned():
            raise CheckpointError(f"`{self.folder}` must belong to this user, but does not; remove it.")

    def require_free_memory(self, num_bytes: int) -> None:
        """CheckpointError unless the node has `num_bytes` of free memory, which this run may use."""
        host_bytes, total = available_memory()
        free_shared = shutil.disk_usage(ROOT).free
        available = max(0, min(free_shared, int(host_bytes - RESERVE * total)))
        if num_bytes > available:
            raise CheckpointError(
                f"{ROOT} on {socket.gethostname()} must have room for {format_gib(num_bytes, 3)} of replicas, but has "
                f"{format_gib(available, 3)} ({format_gib(free_shared, 3)} free there, "
                f"{format_gib(host_bytes, 3)} of memory available); make it larger, or leave "
                "training.replicate_every out."
            )

    def remove(self, session_id: str | None = None) -> None:
        """Removes the replicas of a session, or of all sessions, from this node."""
        if self._is_owned():
            shutil.rmtree(self.folder if session_id is None else self._session(session_id), ignore_errors=True)
            with suppress(OSError):  # other sessions' replicas remain
                self.folder.rmdir()

    def _session(self, session_id: str) -> Path:
        return self.folder / sha256(session_id.encode()).hexdigest()[:16]

    def _is_owned(self) -> bool:
        """Whether the folder exists, is not a link, and belongs to this user; anyone can write to ROOT."""
        with suppress(OSError):
            status = self.folder.lstat()
            return status.st_uid == os.geteuid() and self.folder.is_dir() and not self.folder.is_symlink()
        return False


# The replicas of a session on the remaining nodes, verified.


class ReplicaSource(Source):
    """The replicas newer than step `newer_than`. Ranks of one node divide the verification of its files; files on the
    shared disk count as those of rank 0's node. Creating a source is collective."""

    def __init__(self, session_id: str, newer_than: int, run: RunFolder, group: Group) -> None:
        self._rank = group.rank
        self._manifests: dict[str, Manifest] = {}
        self._valid_files: dict[str, dict[str, Path]] = {}
        self.problems: list[str] = []
        """A sentence for each damaged replica on any node."""
        memory, shared_disk = NodeMemory.of(run), NodeMemory.on_shared_disk(run)
        nodes = group.all_gather_objects(memory.node())
        node_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        folders = memory.replicas(session_id) + (shared_disk.replicas(session_id) if node_ranks[0] == 0 else [])
        files = [file for folder in folders if step_of(folder) > newer_than for file in self._list_files(folder)]
        run_generator_on_all_ranks(group, self._verify(files[node_ranks.index(group.rank) :: len(node_ranks)]))
        problems_by_rank = group.all_gather_objects(self.problems)
        self.problems = list(dict.fromkeys(problem for problems in problems_by_rank for problem in problems))
        valid_files = {replica: set(files) for replica, files in self._valid_files.items()}
        valid_files_by_rank = group.all_gather_objects(valid_files)
        self._writers: dict[str, dict[str, int]] = {}  # {replica: {file: the rank that copies it}}
        for replica in highest_step_first({replica for rank_files in valid_files_by_rank for replica in rank_files}):
            holders = [rank for rank, rank_files in enumerate(valid_files_by_rank) if replica in rank_files]
            pairs = [(name, rank) for rank in reversed(holders) for name in valid_files_by_rank[rank][replica]]
            self._writers[replica] = dict(pairs)
            manifest = self._manifests[replica] if group.rank == holders[0] else None
            (self._manifests[replica],) = filter(None, group.all_gather_objects(manifest))
        self._remaining = iter(self._writers)

    def _list_files(self, folder: Path) -> list[Path]:
        """The existing files of a replica on this node."""
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

    def select_next(self) -> Generator[None, None, tuple[str | None, int]]:
        self._selected = next(self._remaining, "")
        if not self._selected:
            return None, 0
        manifest = self._manifests[self._selected]
        missing_files = [name for name in manifest.files if name not in self._writers[self._selected]]
        if missing_files:
            raise DamagedError(
                f"the replica of step {manifest.step:,} in memory must be complete to be used, but {missing_files[0]} "
                "is on none of the remaining nodes."
            )
        yield  # after `next`: if another rank's error ends this generator here, all ranks go on with the same replica
        return self._selected, manifest.total_bytes

    def write(self, partial_folder: Path) -> Iterator[None]:
        for name, path in self._valid_files.get(self._selected, {}).items():
            if self._writers[self._selected][name] == self._rank:
                yield from copy_file(path, partial_folder / name)
                (partial_folder / name).chmod(partial_folder.stat().st_mode & 0o666)
                try:
                    yield from check_files(partial_folder, {name: self._manifests[self._selected].files[name]})
                except CheckpointError:
                    raise CheckpointError(
                        f"`{partial_folder / name}` must read back as it was written, but does not; check the disk."
                    ) from None

    def write_manifest(self, partial_folder: Path, results: list[Any]) -> None:
        self._manifests[self._selected].write(partial_folder)


# Spare ranks, which do not train, copy the replicas on their nodes into the run's folder, on the shared disk.


WAIT_SECONDS = 30.0
"""How long training ranks wait for the replicas of spare ranks."""


def share_replicas(folder: RunFolder, launch: Launch) -> None:
    """For a spare rank: copies the last session's replicas on its node into the run's folder, if they are newer than
    the checkpoints on disk and there is room. Only a node's first rank does so; where that rank trains, its node needs
    no copies."""
    session_id = last_session_id(folder)
    if session_id is None:
        return
    shared_disk = NodeMemory.on_shared_disk(folder)
    if launch.local_rank == 0:
        with suppress(OSError):
            _copy_newer_replicas(folder, shared_disk, session_id, launch.rank)
    with suppress(OSError):
        done_file = _done_file(shared_disk, session_id, launch, launch.rank)
        done_file.parent.mkdir(parents=True, exist_ok=True)
        done_file.touch()


def _copy_newer_replicas(folder: RunFolder, shared_disk: NodeMemory, session_id: str, rank: int) -> None:
    newest_on_disk = find_checkpoint(folder.path)
    for replica in NodeMemory.of(folder).replicas(session_id):
        name = f"rank-{rank:05d}-of-{replica.parent.name}"
        rank_folder = shared_disk.rank_folder(session_id, rank).with_name(name)
        is_newer = newest_on_disk is None or step_of(replica) > step_of(newest_on_disk)
        if is_newer and not (rank_folder / replica.name).exists() and _has_room(folder.path, replica):
            partial_folder = DiskStorage(rank_folder).partial_folder(replica.name)
            try:
                shutil.rmtree(partial_folder, ignore_errors=True)
                shutil.copytree(replica, partial_folder)
                partial_folder.rename(rank_folder / replica.name)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)


def _has_room(disk: Path, replica: Path) -> bool:
    """Whether a disk can hold a copy of a replica, and then the checkpoint that training ranks make of it; False for a
    damaged replica."""
    with suppress(CheckpointError):
        num_bytes = Manifest.read(replica).total_bytes + sum(file.stat().st_size for file in replica.iterdir())
        return shutil.disk_usage(disk).free >= num_bytes
    return False


def wait_for_spare_ranks(folder: RunFolder, session_id: str, launch: Launch, max_seconds: float) -> None:
    """Waits until all spare ranks have shared their replicas, at most `max_seconds` and WAIT_SECONDS."""
    deadline = time.monotonic() + min(WAIT_SECONDS, max_seconds)
    for rank in range(launch.world_size, launch.world_size + launch.spare_ranks):
        done_file = _done_file(NodeMemory.on_shared_disk(folder), session_id, launch, rank)
        wait_until_visible(done_file, deadline - time.monotonic())


def last_session_id(folder: RunFolder) -> str | None:
    """The id of the last session; None if it ended normally."""
    content = read_if_exists(folder.session)
    return None if content is None else content.decode()


def _done_file(shared_disk: NodeMemory, session_id: str, launch: Launch, rank: int) -> Path:
    """A marker file: the rank has shared its replicas in this rendezvous."""
    rendezvous = sha256(f"{launch.address} {launch.port} {launch.attempt}".encode()).hexdigest()[:16]
    return shared_disk.rank_folder(session_id, rank).with_name(f"done-{rendezvous}-{rank}")


DISCARD_SECONDS = 5.0
"""How long to wait for a cancelled replica."""


class ReplicaWriter:
    """Writes the replicas of one session. All calls are collective over `world_group`, except for `close`.

    Keeps at most two: once the newer one is complete on all ranks, the next `can_start` removes the older one.
    Creating a writer removes replicas of earlier sessions, whose state is on disk by then.
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
        """Whether the last replica is complete on all ranks; if so, removes older ones. CheckpointError on all ranks if
        it failed on one."""
        pending = self._pending
        is_done = pending is None or pending.done()
        error = pending.exception() if pending is not None and is_done else None
        flags = torch.tensor([not is_done, error is not None], dtype=torch.int32)
        is_busy, has_failed = self._world_group.all_reduce_max_(flags).tolist()
        if has_failed:
            message = None if error is None else str(error) or type(error).__name__
            error_message = next(filter(None, self._world_group.all_gather_objects(message)))
            raise CheckpointError(error_message.partition("\n")[0])  # without the stack traces that torch appends
        if not is_busy and pending is not None:
            newest = pending.result()
            for name in self._disk.names():
                if newest is not None and name != newest:
                    self._disk.remove(name)
        return not is_busy

    def start(self, header: Header, snapshot: Snapshot, check: Callable[[], None]) -> None:
        """Starts writing a replica in a thread; call it only after `can_start` returned true. `check` raises if the
        state must not be kept."""
        self._cancelled = threading.Event()
        self._pending = submit(partial(self._write, header, snapshot, check, self._cancelled))

    def discard(self, timeout: float = DISCARD_SECONDS) -> None:
        """Removes all replicas, since the run continues from another state. Cancels a pending one, and waits for it for
        at most `timeout` seconds."""
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
        group, folder = self._group, self._disk.partial_folder(header.name)
        try:
            run_on_all_ranks(group, lambda: self._prepare(folder, snapshot, check))
            entries = run_on_all_ranks(group, lambda: snapshot.write(folder))
            files = dict(zip(snapshot.file_names, entries, strict=True))
            common_header = group.broadcast_object(header)
            if not self._exchange(folder, files, cancelled):
                return None
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
        copies = 1 if self._disk.names() else 2  # the first replica also needs room for the second
        node_ranks = self.peers.ranks_on(self.peers.nodes[self._group.rank])
        stored_ranks = [*node_ranks, *(other_rank for rank in node_ranks for other_rank in self.peers.senders_to(rank))]
        self._memory.require_free_memory(copies * sum(snapshot.bytes_by_rank[rank] for rank in stored_ranks))
        folder.mkdir(parents=True)

    def _exchange(self, folder: Path, files: dict[str, FileEntry], cancelled: threading.Event) -> bool:
        """Sends this rank's file to its peer, and receives the files of `senders_to` this rank; returns False if this
        rank or a sender cancelled it."""
        rank, names, received = self._group.rank, list(files), dict[int, Tensor]()
        peer = self.peers.of(rank)
        if peer is None:
            return True
        sender_files = {other_rank: names[other_rank] for other_rank in self.peers.senders_to(rank)}

        def allocate_files() -> None:
            for other_rank, name in sender_files.items():
                received[other_rank] = _allocate(folder / name, files[name].bytes)

        run_on_all_ranks(self._group, allocate_files)
        sent = torch.from_file(str(folder / names[rank]), size=files[names[rank]].bytes, dtype=torch.uint8)
        if not exchange_bytes(self._group, sent, peer, received, cancelled.is_set):
            return False
        for name in sender_files.values():
            if sha256_of(folder / name) != files[name].sha256:
                raise CheckpointError(f"`{folder / name}` must arrive as it was sent, but did not; check the network.")
        return True


def _allocate(path: Path, size: int) -> Tensor:
    """uint8 [size]: a new file, mapped into memory. Its blocks are allocated at once: a write without room would end
    the process with SIGBUS."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def recover_replica(
    newer_than: int, folder: RunFolder, launch: Launch, group: Group, rules: RetentionRules
) -> RecoveryResult | None:
    """Copies the newest complete replica of the last session to disk as a checkpoint, if it is newer than step
    `newer_than`; otherwise returns None. Collective; CheckpointError if the disk fails or is full.

    The id of the last session is in the run's folder, unless it ended normally. Every file is verified on its node;
    each rank copies some files of its node.
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
    message = f"step {checkpoint.step:,}, {pluralize(newer_by, 'step')} more than on disk"
    details = {"newer_by": newer_by, "rescue_seconds": round(seconds, 3)}
    return RecoveryResult("memory", checkpoint, problems, f"{message}: saved as {name} in {seconds:.1f} s", details)
