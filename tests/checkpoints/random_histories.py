"""Drives the real store through random histories, against a model that knows what led to what.

PYTHONPATH=.:tests python tests/checkpoints/random_histories.py [--count 2000] [--seed 0]

Two disks share a remote store. Sessions begin on either (on the newest checkpoint, or on an older one by name), save,
roll back, are killed before any act on the disk or the store, lose their disk, and find files damaged. At each moment:
no name is used twice, `auto` resumes the newest valid checkpoint of the history that `latest` names, what the rules
keep and what is orphaned stay on the disk, and the store has one history.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megahead.checkpoints.disk import DiskStorage, write_snapshot
from megahead.checkpoints.format import MANIFEST, Header, Snapshot
from megahead.checkpoints.reading import newest_valid, open_checkpoint
from megahead.checkpoints.remote import LeaseLostError, RemoteLease, RemoteStorage, read_state
from megahead.checkpoints.store import Ancestry, RetentionRules, new_checkpoint_name, step_of
from megahead.checkpoints.transfer import fetch_newer, remove_superseded, upload_checkpoint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.remote_files import Store
from megahead.run_folder import RunFolder

RULES = RetentionRules(2, every=5)


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(point: int, *places: tuple[Any, str]) -> Iterator[None]:
    """Right before the `point`-th act, after which nothing is done any more."""
    acts, before = 0, [(place, name, getattr(place, name)) for place, name in places]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            nonlocal acts
            acts += 1
            if acts > point:
                raise Killed
            return function(*given, **named)

        return act

    try:
        for place, name, function in before:
            setattr(place, name, counted(function))
        yield
    except Killed:
        pass
    finally:
        for place, name, function in before:
            setattr(place, name, function)


ON_DISK = [(os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")]
IN_STORE = [(Store, name) for name in ("put", "write", "remove")]


@dataclass
class Session:
    """One that trains on a disk."""

    folder: RunFolder
    ancestry: Ancestry
    lease: RemoteLease
    step: int
    has_saved: bool = False
    """Whether it has saved since it began or last rolled back."""

    is_followed: bool = False
    """Whether another session has taken the store's lease since."""


@dataclass
class Histories:
    """Two disks and a store, and all that was ever saved."""

    chance: random.Random
    root: Path
    parents: dict[str, str | None] = field(default_factory=dict)
    """Of each checkpoint that was ever begun: the one that it continued."""

    saves: int = 0
    sessions: dict[str, Session] = field(default_factory=dict)
    damaged: set[tuple[str, str]] = field(default_factory=set)
    """Checkpoints with a damaged file: the place, and the name."""

    @property
    def remote(self) -> RemoteStorage:
        return RemoteStorage.of(f"file://{self.root}/store")

    def folder(self, disk: str) -> RunFolder:
        return RunFolder(self.root / disk)

    def place(self, where: str) -> DiskStorage:
        """As the model looks at it: the store's folder is laid out as a disk's."""
        return DiskStorage(self.root / where / "checkpoints")

    def chain(self, name: str | None) -> list[str]:
        """A checkpoint and all that led to it, by the model."""
        found: list[str] = []
        while name is not None:
            found.append(name)
            name = self.parents[name]
        return found

    def begin(self, disk: str) -> None:
        """A session begins, on the newest that is valid, or on some older one."""
        folder, place = self.folder(disk), self.place(disk)
        folder.path.mkdir(exist_ok=True)
        seen = read_state(self.remote, folder, "auto")
        expected = self.expected(disk)
        checkpoint, _ = newest_valid(folder.path)
        than = -1 if checkpoint is None else checkpoint.step
        fetched = fetch_newer(than, self.remote.url, folder, Group(), lambda found: None)
        if fetched is not None and fetched.checkpoint is not None:
            checkpoint = fetched.checkpoint
            self.damaged.discard((disk, checkpoint.folder.name))
        name = None if checkpoint is None else checkpoint.folder.name
        assert expected is None or name == expected[0], (disk, name, expected)
        older = [each for each in place.history()[1:] if (disk, each) not in self.damaged]
        if older and self.chance.random() < 0.25:
            name = self.chance.choice(older)
            checkpoint = open_checkpoint(place.root / name)
        ancestry = Ancestry.of(name, checkpoint and checkpoint.manifest, place.names(), seen.names)
        assert set(ancestry.ancestors) == set(self.chain(name))
        lease = RemoteLease(self.remote.store, folder, f"{disk} {self.chance.random()}", seen)
        lease.acquire()
        for other in self.sessions.values():
            other.is_followed = True
        self.sessions[disk] = Session(folder, ancestry, lease, max(ancestry.step, 0))

    def expected(self, disk: str) -> tuple[str | None] | None:
        """What `auto` must resume; None where a damaged manifest keeps anyone from knowing."""
        here, there = self.place(disk), self.place("store")
        if any(not self.has_manifest(place) for place in (here, there)):
            return None
        chain = self.chain(here.latest.name)
        own = self.valid(disk, chain)
        newest = None if not own else own[0]
        passed = set(here.manifest(chain[0]).orphaned) if chain else set[str]()
        whole = self.remote.latest.name
        went_back = whole is not None and not set(chain).isdisjoint(there.manifest(whole).orphaned)
        for name in self.chain(whole):
            is_newer = newest is None or step_of(name) > step_of(newest) or (went_back and name not in chain)
            if name in passed or not is_newer:
                break
            if self.valid("store", [name]):
                return (name,)
        return (newest,)

    def has_manifest(self, place: DiskStorage) -> bool:
        """Whether `latest` says what led to it; True for an empty place."""
        try:
            name = place.latest.name
            return not place.names() or (name is not None and bool(place.manifest(name)))
        except CheckpointError:
            return False

    def valid(self, where: str, names: list[str]) -> list[str]:
        there = self.place(where).names()
        return [name for name in names if name in there and (where, name) not in self.damaged]

    def save(self, disk: str, killed: int | None = None) -> None:
        """The session saves; or is killed before some act."""
        session, place = self.sessions[disk], self.place(disk)
        session.step += self.chance.choice((1, 1, 2))
        name = new_checkpoint_name(session.step)
        assert name not in self.parents
        self.parents[name] = session.ancestry.newest
        before, latest = place.names(), place.latest.name
        snapshot = Snapshot.take([("w", torch.full((3,), float(len(self.parents))))], Group())
        header = Header(
            name, session.step, {"step": session.step}, {}, session.ancestry.ancestors, session.ancestry.orphaned
        )
        with killed_at(10_000 if killed is None else killed, *ON_DISK):
            write_snapshot(place.root, header, snapshot, Group(), RULES)
        self.saves += 1
        session.ancestry.add(name)
        if killed is not None:
            del self.sessions[disk]
        session.has_saved = True
        assert place.latest.name in ((latest, name) if killed is not None else (name,))
        self.check_disk(disk, before)

    def check_disk(self, disk: str, before: list[str]) -> None:
        """What must stay is there: the newest of the history, milestones, and all that is orphaned."""
        place = self.place(disk)
        if not self.has_manifest(place):
            return
        newest = place.latest.name
        chain = self.chain(newest)
        assert set(place.history()) <= set(chain)
        there = [name for name in chain if name in before or name == newest]
        kept = [*there[: RULES.newest], *(name for name in there if step_of(name) % 5 == 0)]
        kept += [name for name in before if name not in chain]
        assert set(kept) <= set(place.names()), (kept, place.names())

    def roll_back(self, disk: str) -> None:
        """To an earlier one of what led to the session's weights."""
        session = self.sessions[disk]
        there = self.valid(disk, list(session.ancestry.ancestors))
        if there:
            session.ancestry.roll_back(self.chance.choice(there))
            session.step, session.has_saved = session.ancestry.step, False

    def upload(self, disk: str, killed: int | None = None) -> None:
        """The newest that the session saved goes to the store, unless another has taken the lease."""
        session, store = self.sessions[disk], self.place("store")
        tip = session.ancestry.newest
        if tip is None or not session.has_saved or tip not in self.place(disk).names() or (disk, tip) in self.damaged:
            return
        latest = store.latest.name
        if tip not in store.names():
            self.damaged.discard(("store", tip))
        try:
            with killed_at(10_000 if killed is None else killed, *IN_STORE):
                session.lease.acquire()
                upload_checkpoint(self.remote, self.place(disk).root / tip, session.lease.check, is_new=True)
                remove_superseded(self.remote, tip, RULES)
                assert self.has_one_history(tip)
        except LeaseLostError:
            assert session.is_followed
            assert store.latest.name == latest
            del self.sessions[disk]
            return
        if killed is not None:
            del self.sessions[disk]
        assert killed is not None or not session.is_followed
        assert store.latest.name in ((latest, tip) if killed is not None else (tip,))

    def has_one_history(self, tip: str) -> bool:
        return self.remote.orphans() == [] and set(self.remote.history()) <= set(self.chain(tip))

    def damage(self) -> None:
        """A byte of some file is another."""
        where = self.chance.choice(("a", "b", "store"))
        names = [name for name in self.place(where).names() if (where, name) not in self.damaged]
        if not names:
            return
        name = self.chance.choice(sorted(names))
        files = sorted((self.place(where).root / name).iterdir())
        file = files[0] if self.chance.random() < 0.1 else files[-1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        self.damaged.add((where, name))
        assert file.name == MANIFEST or file.suffix == ".safetensors"

    def lose(self, disk: str) -> None:
        """A disk is lost, with its session."""
        shutil.rmtree(self.folder(disk).path, ignore_errors=True)
        self.sessions.pop(disk, None)
        self.damaged = {each for each in self.damaged if each[0] != disk}

    def act(self) -> None:
        """One thing happens."""
        disk, dice = self.chance.choice("ab"), self.chance.random()
        if dice < 0.06:
            self.damage()
        elif dice < 0.09:
            self.lose(disk)
        elif disk not in self.sessions or dice < 0.15:
            self.sessions.pop(disk, None)
            self.begin(disk)
        elif dice < 0.5:
            self.save(disk)
        elif dice < 0.58:
            self.save(disk, killed=self.chance.randrange(16))
        elif dice < 0.66:
            self.roll_back(disk)
        elif dice < 0.92:
            self.upload(disk)
        else:
            self.upload(disk, killed=self.chance.randrange(8))


def torture(folder: Path, count: int, seed: int, acts: int = 30) -> int:
    """That many histories; returns the saves in them. AssertionError where one is not as it must be."""
    saves = 0
    for number in range(seed, seed + count):
        root = folder / str(number)
        (root / "store").mkdir(parents=True)
        histories = Histories(random.Random(number), root)
        try:
            with patch("os.fsync", lambda _: None):  # nothing here outlives a power cut, and it takes most of the time
                for _ in range(acts):
                    histories.act()
        except BaseException as error:
            error.add_note(f"in the history of seed {number}")
            raise
        saves += histories.saves
        shutil.rmtree(root)
    return saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        saves = torture(Path(folder), arguments.count, arguments.seed)
    print(f"{saves:,} saves in {arguments.count:,} random histories: none lost, no name used twice, no mixture")


if __name__ == "__main__":
    main()
