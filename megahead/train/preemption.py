"""Being asked to stop: noticed at once, acted upon when all ranks are ready, written down for who starts us again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from megahead.checkpoint.durable import write_atomically
from megahead.distributed import Group

Ending = Literal["finished", "out of time", "stopped"]
ENDING = "ending.json"


class StopRequest:
    """Remembers SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`) until someone asks; more change nothing."""

    def __init__(self) -> None:
        self.signal: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def agreed(self, world: Group) -> bool:
        """Whether any rank was asked to stop, the same answer on all. Collective."""
        return bool(world.max_(torch.tensor(int(self.signal is not None))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name


def mark_ending(folder: Path, ending: Ending, step: int, steps: int) -> None:
    """RUN/ending.json: how the session ended; there only while none runs, and not after one that was killed."""
    write_atomically(folder / ENDING, json.dumps({"ending": ending, "step": step, "steps": steps}) + "\n")


def clear_ending(folder: Path) -> None:
    """A session begins."""
    (folder / ENDING).unlink(missing_ok=True)
