"""What may go wrong from outside or inside: signals that ask to stop, and steps that may not be applied."""

from __future__ import annotations

import signal
from types import FrameType

from megahead.errors import UserError

MAX_SKIPPED_IN_A_ROW = 20


class StopRequest:
    """Remembers SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`) until the loop asks."""

    def __init__(self) -> None:
        self.signal: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name


class SkipLimit:
    """Counts steps skipped in a row, and gives up where more of the same cannot help."""

    def __init__(self, limit: int = MAX_SKIPPED_IN_A_ROW) -> None:
        self._limit = limit
        self._in_a_row = 0

    def note(self, applied: bool, step: int) -> None:
        """UserError once `limit` steps in a row were not applied."""
        self._in_a_row = 0 if applied else self._in_a_row + 1
        if self._in_a_row >= self._limit:
            raise UserError(
                f"gradients must be finite, but were not for {self._limit} steps in a row at step {step}; "
                "lower optimizer.learning_rate, clip harder, or use fp32 or bf16, and resume from the last checkpoint."
            )
