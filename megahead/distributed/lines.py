"""A line: a TCP connection for short JSON messages. When one process dies, the other end is closed at once."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from math import ceil
from threading import Lock
from typing import Any


class Line:
    """One end of a line. No call blocks for more than a second, even if the other process is suspended."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1)
        self._connection, self._rest, self._speaking = connection, b"", Lock()
        self.silent_beats = 0
        """Beats since the last message, counted by the caller; see `Pulse`."""

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, *words: Any) -> None:
        """Sends one message, from any thread; it is lost if the other end is gone."""
        with self._speaking, suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived; call it when `select` finds the line readable. EOFError when the other end is
        gone, or sends something that is not our format."""
        try:
            received = self._connection.recv(1 << 16)
            *complete, self._rest = (self._rest + received).split(b"\n")
            messages: list[list[Any]] = [json.loads(message) for message in complete]
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError from error
        if not received:
            raise EOFError
        self.silent_beats = 0
        return messages

    def close(self) -> None:
        """Closes the connection, which the other end notices."""
        self._connection.close()


def notice_lost_host(connection: socket.socket, seconds: float) -> None:
    """Breaks `connection`, or those that it accepts, when the machine at the other end is silent for `seconds`. A
    process there that is stopped or swapped out is another matter: its machine answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", seconds / 4), ("KEEPINTVL", seconds / 4), ("USER_TIMEOUT", 1000 * seconds)):
        if hasattr(socket, f"TCP_{option}"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), ceil(value))


class Pulse:
    """When to send a heartbeat (a beat), so that silence means that the other end is lost.

    Silence is counted in this process's own beats, not in seconds, so that a process that was suspended for a while
    does not take the others for lost when it continues.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._every, self._next = min(limit_seconds / 10, 15.0), time.monotonic()
        self.limit_beats = ceil(limit_seconds / self._every)
        """Beats in `limit_seconds`."""

    def pause(self) -> float:
        """Seconds until the next beat."""
        return max(0.0, self._next - time.monotonic())

    def due(self) -> bool:
        """Whether it is time for a beat; True once per beat."""
        if self.pause():
            return False
        self._next = time.monotonic() + self._every
        return True
