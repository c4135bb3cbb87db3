"""A session's hold on its run's folder, so that of two sessions there only the later one writes.

torchrun's agents may give a node up that only its network had left: it still trains, while the others begin again from
the newest checkpoint. Whoever begins last has the folder.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from megahead.errors import UserError
from megahead.files import write_atomically


def session_mark() -> str:
    """One that no other session has."""
    return f"{socket.gethostname()}, process {os.getpid()} ({secrets.token_hex(4)})\n"


class Hold:
    """Taken when it is made. Between `check` and what is written then another session may still begin."""

    def __init__(self, file: Path, mark: str) -> None:
        self._file = file
        self.mark = mark
        """What the file holds now."""
        write_atomically(file, self.mark)

    def check(self) -> None:
        """UserError if another session has begun since."""
        there = self._there()
        if there is not None and there != self.mark:
            raise UserError(
                f"output_dir must have one session at a time, but in {self._file.parent} another has begun "
                f"on {there.strip()}; "
                "this one ends, and what it has not saved is the other's to do again."
            )

    def release(self) -> None:
        """Leaves the folder to whoever comes."""
        if self._there() == self.mark:
            self._file.unlink(missing_ok=True)

    def _there(self) -> str | None:
        try:
            return self._file.read_text(encoding="utf-8")
        except OSError:  # removed by someone, or not to be read just now: no sign of another session
            return None
