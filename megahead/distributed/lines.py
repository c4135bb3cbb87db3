"""A line between two processes: a few JSON values over TCP. When one process dies, the other hears it at once."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from math import ceil
from threading import Lock
from typing import Any


class Line:
    """One end of a line. Never blocks for long, whatever became of the other end."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1)
        self._connection, self._rest, self._speaking = connection, b"", Lock()
        self.silent_beats = 0
        """Beats since something was heard, counted by whoever listens."""

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, *words: Any) -> None:
        """Sends one message, from any thread; to an end that is gone it is lost."""
        with self._speaking, suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived, once `select` says that there is something. EOFError when the other end is
        gone, or does not speak like one of ours."""
        try:
            received = self._connection.recv(1 << 16)
            *whole, self._rest = (self._rest + received).split(b"\n")
            messages: list[list[Any]] = [json.loads(message) for message in whole]
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError from error
        if not received:
            raise EOFError
        self.silent_beats = 0
        return messages

    def close(self) -> None:
        """The other end hears it."""
        self._connection.close()


class Pulse:
    """How often lines are used although there is nothing to say, so that silence means something.

    A limit is counted in beats of one's own, not in time: who was stopped itself then accuses nobody when it goes on.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._every, self._next = min(limit_seconds / 10, 15.0), time.monotonic()
        self.beats = ceil(limit_seconds / self._every)
        """In the limit."""

    def pause(self) -> float:
        """Seconds until the next beat."""
        return max(0.0, self._next - time.monotonic())

    def due(self) -> bool:
        """Whether it is time for a beat; True once for each."""
        if self.pause():
            return False
        self._next = time.monotonic() + self._every
        return True
