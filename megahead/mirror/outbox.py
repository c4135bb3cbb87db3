"""What waits to be sent to a mirror: one checkpoint on its way, the newest of the others, and the run's small files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megahead.checkpoint import step_of

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
