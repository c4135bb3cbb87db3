"""What a session abandons in its mirror with its first save, from then until it is gone there."""

from __future__ import annotations

import threading
from contextlib import suppress

from megahead.mirror.abandoned import forget, hashes_above, write_down, written_down
from megahead.mirror.far_run import FarRun
from megahead.run_folder import RunFolder


class Abandonment:
    """Of a session that begins with the checkpoint of step `tip`: until it has saved one of its own, it may yet go on
    from newer ones in the mirror. Any thread may call `saved`; the mirror's calls the others."""

    def __init__(self, far: FarRun, folder: RunFolder, tip: int) -> None:
        self._far, self._folder, self._tip = far, folder, tip
        self._above: set[str] | None = None
        self._saved, self._noting = False, threading.Lock()

    @property
    def is_known(self) -> bool:
        """Whether the mirror could be read."""
        return self._above is not None

    def look(self) -> None:
        """Reads what is newer in the mirror; before the session sends anything. FarError if that cannot be read."""
        self._above = hashes_above(self._far, self._tip)
        with self._noting:
            self._write_down()

    def saved(self) -> None:
        """The session has saved a checkpoint. Written down at once: it may be long until that is sent, and the session
        be killed before."""
        with self._noting:
            self._saved = True
            self._write_down()

    def written_down(self) -> set[str]:
        """The hashes of what the mirror should not have any more, also by earlier sessions."""
        with self._noting:
            self._write_down()  # once more, if the disk was full
        return written_down(self._folder, self._far.url)

    def is_gone(self, hashes: set[str], and_newer: bool) -> None:
        """The mirror has none of `hashes` any more, which were written down; nor, with `and_newer`, what was newer."""
        with self._noting, suppress(OSError):
            if and_newer:
                self._above = set()
            forget(self._folder, self._far.url, hashes)

    def _write_down(self) -> None:
        if self._saved and self._above:
            with suppress(OSError):  # a full disk; most likely the checkpoint will be sent
                write_down(self._folder, self._far.url, self._above)
