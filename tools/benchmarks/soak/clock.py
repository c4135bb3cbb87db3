"""The clock by which torchrun's agents tell who is still there, and that may jump."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from pathlib import Path

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def keep_time_by(ahead: Path) -> None:
    """From here on this process's agent has a clock that runs ahead by the hours in that file, while it is there. That
    it was read then, a file beside it says."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            try:
                hours = float(ahead.read_text())
            except FileNotFoundError:
                return datetime.now(tz)
            ahead.with_suffix(".read").touch()
            return datetime.now(tz) + timedelta(hours=hours)

    dynamic_rendezvous.datetime = Clock  # type: ignore[attr-defined]
