"""The agent of launch/elastic.sh on a node of the soak, with a clock that jumps when the soak wants it to."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

from megahead.distributed.agent import keep_rendezvous_open


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


if __name__ == "__main__":
    keep_time_by(Path(os.environ["SOAK_NODE"]) / "ahead")
    keep_rendezvous_open()
    main()
