"""Sends checkpoints to an object store in the background."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from megahead.background import begin
from megahead.checkpoints.folders import MANIFEST, FileEntry, KeepRules, Manifest, step_of, surplus
from megahead.checkpoints.remote import (
    CHECKPOINTS,
    Abandonment,
    Claim,
    FarRun,
    Listing,
    News,
    TakenOverError,
    abandoned_by,
    arrived,
    failed,
    is_one_of,
    log_failed,
    newest_first,
    skipped,
    step_in,
)
from megahead.errors import CheckpointError, UserError
from megahead.remote_files import DamagedError, Expected, joined, receive
from megahead.run_folder import RunFolder

# Sends a checkpoint: files beside, read back, then the name. What need not be kept there goes afterwards.


_AT_ONCE = 4
"""Files that are under way together."""


def send(far: FarRun, folder: Path, parent_step: int, refuse: Callable[[], None]) -> int:
    """Puts the checkpoint in `folder` into a mirror; returns the bytes sent. FarError, DamagedError if the store fails
    or has not kept what it was sent: then it has no name there.

    `parent_step`: that of the checkpoint which it continues; later ones are of a history that the run abandoned, as are
    others of which its disk tells that (`abandoned_by`), and lose their names before this one gets its own. `refuse` is
    called before that, and before each file; it raises an error if the mirror is another's now.
    """
    target, listing = _place_of(folder), far.list(CHECKPOINTS)
    text = (folder / MANIFEST).read_bytes()
    manifest = Manifest.parse(text, str(folder / MANIFEST))
    _clear_remains(far, listing, target)
    continued = step_in(target) <= parent_step  # else what has its name is of a history that was abandoned
    missing = _missing(far, target, listing.get(target, {}) if continued else {}, manifest)
    if missing and MANIFEST in listing.get(target, {}):
        far.store.remove(f"{target}/{MANIFEST}")
    sent = _send_files(far, folder, target, missing, refuse)
    _must_have(far, target, manifest)
    refuse()
    _abandon(far, listing, target, parent_step, abandoned_by(RunFolder.of(folder)))
    far.store.write(f"{target}/{MANIFEST}", text)
    return sent


def settle(far: FarRun, folder: Path, keep: int, keep_rules: KeepRules) -> None:
    """After `send`: what has lost its name goes. Unless newer ones are there, which the run may yet go on from,
    `latest` names the checkpoint, and what the rules do not keep goes, too."""
    target, listing = _place_of(folder), far.list(CHECKPOINTS)
    is_newest = newest_first(listing)[:1] == [target]
    if is_newest:
        far.store.write(f"{CHECKPOINTS}/latest", f"{folder.name}\n".encode())
    _clear_remains(far, listing, target)
    if is_newest:
        _retain(far, listing, target, keep, keep_rules)


def _place_of(folder: Path) -> str:
    return f"{CHECKPOINTS}/{folder.name}"


def _clear_remains(far: FarRun, listing: Listing, target: str) -> None:
    """Removes what has no name, but for what is written anew."""
    for folder, files in listing.items():
        if MANIFEST not in files and folder != target:
            far.remove(folder, files)


def _missing(far: FarRun, target: str, there: dict[str, int], manifest: Manifest) -> dict[str, FileEntry]:
    """Files to be sent: a checkpoint that is saved again (with the result of an evaluation, say) has the same ones."""
    known: dict[str, FileEntry] = {}
    if MANIFEST in there:
        try:
            known = far.manifest(target)[1].files
        except (CheckpointError, FileNotFoundError):
            known = {}
    same = {
        name for name, entry in manifest.files.items() if known.get(name) == entry and there.get(name) == entry.bytes
    }
    return {name: entry for name, entry in manifest.files.items() if name not in same}


def _send_files(far: FarRun, folder: Path, target: str, files: dict[str, FileEntry], refuse: Callable[[], None]) -> int:
    names = sorted(files, key=lambda name: files[name].bytes, reverse=True)
    lanes = [
        partial(_send_some, far, folder, target, {name: files[name] for name in names[k::_AT_ONCE]}, refuse)
        for k in range(_AT_ONCE)
    ]
    under_way: list[Future[None]] = [begin(lane) for lane in lanes]
    for each in under_way:
        each.exception()  # all have ended before one raises
    for each in under_way:
        each.result()
    return sum(entry.bytes for entry in files.values())


def _send_some(far: FarRun, folder: Path, target: str, files: dict[str, FileEntry], refuse: Callable[[], None]) -> None:
    """Sends files one after the other, and reads each back, whole: a store may lose what it has acknowledged."""
    for name, entry in files.items():
        refuse()  # the other's may have the same names
        far.store.put(folder / name, f"{target}/{name}")
        for _ in receive(far.store, f"{target}/{name}", Expected(entry.bytes, entry.sha256), len):
            pass


def _must_have(far: FarRun, target: str, manifest: Manifest) -> None:
    """DamagedError unless all files are there: somebody may have emptied the mirror meanwhile."""
    there = far.list(target).get(target, {})
    for name, entry in manifest.files.items():
        if there.get(name) != entry.bytes:
            place = joined(far.url, f"{target}/{name}")
            raise DamagedError(f"`{place}` must stay while its checkpoint is sent, but is gone.")


def _abandon(far: FarRun, listing: Listing, target: str, parent_step: int, abandoned: set[str]) -> None:
    for folder in newest_first(listing):
        if folder != target and (step_in(folder) > parent_step or is_one_of(far, folder, abandoned)):
            far.store.remove(f"{folder}/{MANIFEST}")  # its files go later: they are many, and the mirror's newest waits


def _retain(far: FarRun, listing: Listing, target: str, keep: int, keep_rules: KeepRules) -> None:
    others = [folder for folder in newest_first(listing) if folder != target]

    def read(folder: str) -> Manifest:
        return far.manifest(folder)[1]

    for folder in surplus(target, others, keep, keep_rules, lambda name: step_of(Path(name)), read):
        far.remove(folder, listing[folder])


# What waits to be sent to a mirror: one checkpoint on its way, the newest of the others, and the run's small files.


NO_STEP = sys.maxsize
"""No step is above it."""


@dataclass(frozen=True)
class Parcel:
    """A checkpoint to be sent."""

    folder: Path
    parent_step: int
    """The step that it continues: later ones in the mirror are of a history that was abandoned. `NO_STEP`: none are."""

    @property
    def turns_away(self) -> bool:
        """Whether any are."""
        return self.parent_step < NO_STEP

    @property
    def step(self) -> int:
        return step_of(self.folder)


class Outbox:
    """One thread puts in, another takes out; nothing but taking and `pause` waits.

    A checkpoint that was not sent is *owed*: what it would have removed from the mirror is for the next one to remove.
    """

    def __init__(self) -> None:
        self.in_hand: set[int] = set()
        """Steps of checkpoints that must not be removed from the disk yet."""
        self._change = threading.Condition()
        self._waiting: Parcel | None = None
        self._on_its_way: Parcel | None = None
        self._owed = NO_STEP
        self._files = True
        self._busy = self._closed = False

    def put(self, parcel: Parcel) -> Parcel | None:
        """Returns the one that it takes the place of, if that is never sent now, and had been saved since the session
        began."""
        with self._change:
            passed_over, self._waiting = self._waiting, parcel
            if passed_over is not None:
                self._owed = min(self._owed, passed_over.parent_step)
            self._note()
            if passed_over is None or passed_over.folder in self._folders() or not passed_over.turns_away:
                return None
            return passed_over

    def put_files(self) -> None:
        """The small files are sent once more."""
        with self._change:
            self._files = True
            self._change.notify_all()

    def close(self) -> None:
        """Taking ends once nothing is left."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def __iter__(self) -> Iterator[Parcel | None]:
        """Waits for the next checkpoint, or for files alone (None); ends once it is closed and nothing is left.

        The one before is no longer on its way.
        """
        while True:
            with self._change:
                self._on_its_way, self._busy = None, False
                self._note()
                self._change.wait_for(lambda: self._waiting is not None or self._files or self._closed)
                parcel = self._take()
                if not self._busy:
                    return
            yield parcel

    def _take(self) -> Parcel | None:
        parcel, self._waiting = self._waiting, None
        self._busy = parcel is not None or self._files
        if parcel is not None:
            parcel = replace(parcel, parent_step=min(parcel.parent_step, self._owed))
            self._owed = NO_STEP
        self._on_its_way = parcel
        return parcel

    def files_taken(self) -> None:
        """Files that change from now on have to be put in once more."""
        with self._change:
            self._files = False

    def owe(self, parcel: Parcel) -> None:
        """It was not sent."""
        with self._change:
            self._owed = min(self._owed, parcel.parent_step)

    def pause(self, seconds: float) -> bool:
        """Waits; ends at once, and is True, when a newer checkpoint has been put in."""
        with self._change:
            return self._change.wait_for(lambda: self._waiting is not None, seconds)

    def is_empty(self) -> bool:
        """Whether nothing waits, and nothing is on its way."""
        with self._change:
            return not (self._busy or self._waiting is not None or self._files)

    def _folders(self) -> set[Path]:
        return {parcel.folder for parcel in (self._on_its_way, self._waiting) if parcel is not None}

    def _note(self) -> None:
        now = {step_of(folder) for folder in self._folders()}
        self.in_hand |= now  # never without one of them: another thread looks
        self.in_hand &= now
        self._change.notify_all()


# Copies finished checkpoints to the mirror in a thread, so that no step waits for the store.


PAUSES = (0.0, 1.0, 10.0)
"""Seconds before each attempt."""

TELL_SECONDS = 10.0
"""Between two lines while the run waits for its last upload."""


class Mirror:
    """Rank 0's copies of its run in a store. Its methods return at once.

    One checkpoint is on its way at a time; of those that are saved meanwhile only the newest is sent next. What goes
    wrong is tried again, then told; the next checkpoint is sent all the same, and the run does not depend on it.
    """

    def __init__(
        self, far: FarRun, folder: RunFolder, claim: Claim, tip: int, keep: int, keep_rules: KeepRules
    ) -> None:
        """`claim`: the session's; `tip`: the step of the checkpoint in `folder` that it begins with, -1 if there is
        none; `keep`, `keep_rules`: which checkpoints stay in the mirror."""
        self._far, self._folder = far, folder
        self._keep, self._keep_rules = keep, keep_rules
        self._claim, self._begun = claim, False
        self._abandonment = Abandonment(far, folder, tip)
        self._taken: UserError | None = None
        self._outbox, self._news = Outbox(), SimpleQueue[News]()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._far.url

    @property
    def in_hand(self) -> set[int]:
        """Steps of checkpoints that must not be removed yet, because they are being read."""
        return self._outbox.in_hand

    def offer(self, folder: Path, parent_step: int) -> None:
        """Sends a finished checkpoint, which continues the one of `parent_step`, when its turn comes."""
        self._abandonment.saved()
        self._put_in(Parcel(folder, parent_step))

    def offer_again(self, folder: Path) -> None:
        """Sends the checkpoint that a session begins with, as far as it is not there. Nothing goes for it: the run may
        yet go on from newer ones."""
        self._put_in(Parcel(folder, NO_STEP))

    def _put_in(self, parcel: Parcel) -> None:
        passed_over = self._outbox.put(parcel)
        if passed_over is not None:
            self._news.put(skipped(passed_over.step, self.url))

    def offer_files(self) -> None:
        """Sends the run's small files once more, as they are now."""
        self._outbox.put_files()

    def close(self) -> None:
        """Ends the thread once nothing is left to be sent."""
        self._outbox.close()

    def check(self) -> None:
        """UserError if another session was seen to have begun with this mirror."""
        if self._taken is not None:
            raise self._taken

    def news(self) -> list[News]:
        """What happened since the last call."""
        return [self._news.get() for _ in range(self._news.qsize())]  # only this thread takes some

    def finishing(self, deadline: float = math.inf) -> Iterator[None]:
        """Ends when nothing is left to be sent, or all attempts have failed, or the monotonic clock is there; yields
        often."""
        told = time.monotonic()
        while self._thread.is_alive() and not self._outbox.is_empty() and time.monotonic() < deadline:
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(f"waiting until the last checkpoint is in {self.url}", flush=True)
            time.sleep(0.02)
            yield

    def _work(self) -> None:
        """The thread: a checkpoint, then the small files, whenever there are some."""
        for parcel in self._outbox:
            if parcel is None or self._send(parcel):
                self._send_files(parcel)

    def _send(self, parcel: Parcel) -> bool:
        """Whether it is there then; else that is told."""
        began = time.monotonic()

        def attempt() -> None:
            self._begin()
            abandoned = self._abandonment.written_down()
            sent = send(self._far, parcel.folder, parcel.parent_step, self._claim.refuse_another)
            self._abandonment.is_gone(abandoned, and_newer=parcel.turns_away)
            self._news.put(arrived(parcel.step, time.monotonic() - began, sent))

        reason = self._failure_of(attempt, lambda: _is_gone(parcel.folder))
        if reason is None:
            return True
        self._outbox.owe(parcel)
        if not _is_gone(parcel.folder):  # else set aside when the run went back; the checkpoint that did so follows
            self._news.put(failed(parcel.step, parcel.folder, reason))
        return False

    def _send_files(self, sent: Parcel | None) -> None:
        """The run's small files; before them, removes what a checkpoint that was `sent` makes superfluous."""
        self._outbox.files_taken()

        def attempt() -> None:
            self._begin()
            if sent is not None:
                settle(self._far, sent.folder, self._keep, self._keep_rules)
            self._put(self._folder.metrics, self._folder.ending)

        reason = self._failure_of(attempt)
        if reason is not None:
            self._news.put(log_failed(reason))

    def _failure_of(self, attempt: Callable[[], None], is_in_vain: Callable[[], bool] = lambda: False) -> str | None:
        """Why all attempts failed; None once one did not. A newer checkpoint ends them: it takes this one's place."""
        reason = None
        for pause in PAUSES:
            if self._outbox.pause(pause) and reason is not None:
                break
            try:
                attempt()
            except Exception as error:
                reason = self._reason(error)
            else:
                return None
            if self._taken is not None or is_in_vain():
                break
        return reason

    def _begin(self) -> None:
        """Also whenever something is sent later: another session may have begun since, or somebody emptied it."""
        self.check()
        if not self._abandonment.is_known:
            self._claim.refuse_another()
            self._abandonment.look()
        if self._claim.hold():
            self._begun = False
        if not self._begun:
            self._far.store.remove(self._folder.ending.name)
            tokenizers = self._folder.tokenizer_json, self._folder.tokenizer_model
            self._put(self._folder.config, *tokenizers, self._folder.published)
            self._begun = True

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TakenOverError):
            self._taken = error
        return str(error) if isinstance(error, UserError) else repr(error)

    def _put(self, *paths: Path) -> None:
        """Sends small files, as far as they are there."""
        for path in paths:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._far.store.write(path.name, content)


def _is_gone(folder: Path) -> bool:
    """Whether it has another name now; False where the disk cannot tell."""
    with suppress(OSError):
        return not folder.is_dir()
    return False
