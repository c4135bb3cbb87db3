"""Progress of a long reading job; `Bar` draws it in a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ByteProgress(Protocol):
    """Is told how far a job is that reads files of a known total size."""

    def begin(self, total_bytes: int | None) -> None:
        """The files' size on disk; None if it is not known."""

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """More bytes were read from disk, and came out as this many bytes of text."""


class Silent:
    """Shows no progress."""

    def begin(self, total_bytes: int | None) -> None:
        """Ignored."""

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """Ignored."""


class Bar:
    """`with Bar("Tokenizing") as bar`: a bar on stderr with megabytes of text, their rate, and the time left."""

    def __init__(self, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[text]:,.0f} MB, {task.fields[rate]:.1f} MB/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task: TaskID = self._progress.add_task(title, total=None, text=0.0, rate=0.0)
        self._text_bytes = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, total_bytes: int | None) -> None:
        """Starts the clock."""
        self._progress.reset(self._task, total=total_bytes)

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """Moves the bar."""
        self._text_bytes += text_bytes
        megabytes = self._text_bytes / 1e6
        seconds = self._progress.tasks[0].elapsed or 0.0
        rate = megabytes / seconds if seconds else 0.0
        self._progress.update(self._task, advance=read_bytes, text=megabytes, rate=rate)
