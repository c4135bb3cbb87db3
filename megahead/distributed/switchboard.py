"""Runs on rank 0, to which every rank has a connection (a line): finds out which ranks are lost, and tells the others.

A rank that dies is noticed at once, because its line breaks; one that is suspended, or whose machine is gone, after it
was silent for the time limit. A rank that hangs still sends heartbeats (beats) from its thread: it is found when
another rank reports that it gave up waiting, and this one reports nothing within GRACE_SECONDS.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from megahead.distributed.lines import Line, Pulse, notice_lost_host

GRACE_SECONDS = 5.0
"""Seconds that ranks have to report after one gave up waiting, and then to end by themselves."""

_MORE_SECONDS = 1.0
"""Seconds to wait for further lost ranks after the first, since ranks seldom die alone."""


class Switchboard:
    """Expects `size` ranks within `limit_seconds`; listens until all have left or one is lost.

    `onlookers`: as many ranks beyond these are told how it ends. Nobody waits for them, and they may be lost.
    `host_timeout_seconds`: a machine that is silent for that long is lost; by default only its ranks' silence counts.
    """

    def __init__(
        self, size: int, limit_seconds: float, onlookers: int = 0, host_timeout_seconds: float | None = None
    ) -> None:
        self._all, self._limit = frozenset(range(size)), limit_seconds
        self._onlookers = frozenset(range(size, size + onlookers))
        self._door, self._token = _listen(size + onlookers), secrets.token_hex(8)
        if host_timeout_seconds is not None:
            notice_lost_host(self._door, host_timeout_seconds)
        self._lines: dict[int, Line] = {}
        self._gave_up: set[int] = set()
        self._left: set[int] = set()
        self._lost: dict[int, str] = {}
        self._pulse, self._beats_sent = Pulse(limit_seconds), -1
        self._doubt_since, self._over = 0.0, False
        self._selector = DefaultSelector()
        self._selector.register(self._door, EVENT_READ, self._admit)

    @property
    def address(self) -> str:
        """Port and password for the other ranks."""
        return f"{self._door.getsockname()[1]} {self._token}"

    def start(self) -> Line:
        """Begins to listen, in a thread; returns rank 0's own line."""
        here, mine = socket.socketpair()
        self._add_line(0, Line(here))
        threading.Thread(target=self._serve, name="switchboard", daemon=True).start()
        return Line(mine)

    def _serve(self) -> None:
        while not self._over:
            pause = self._pulse.pause()
            for key, _ in self._selector.select(min(pause, 0.1) if self._in_doubt() else pause):
                key.data()
            if self._pulse.due():
                self._beat()
            self._conclude()

    def _admit(self) -> None:
        connection, _ = self._door.accept()
        line = Line(connection)
        self._selector.register(line, EVENT_READ, lambda: self._greet(line))

    def _greet(self, line: Line) -> None:
        """Reads a rank's first messages; connections from anything else are closed."""
        self._selector.unregister(line)
        try:
            (_, token, rank), *more = line.receive()
        except (EOFError, ValueError, TypeError):
            token, rank, more = "", 0, []
        if token == self._token and rank in (self._all | self._onlookers) - self._lines.keys():
            self._add_line(rank, line)
            self._hear(rank, more)
        else:
            line.close()

    def _add_line(self, rank: int, line: Line) -> None:
        self._lines[rank] = line
        self._selector.register(line, EVENT_READ, lambda: self._listen_to(rank))
        if rank in self._all and self._lines.keys() >= self._all:
            self._send_all("here")
        if self._lines.keys() == self._all | self._onlookers:
            self._selector.unregister(self._door)
            self._door.close()

    def _listen_to(self, rank: int) -> None:
        try:
            self._hear(rank, self._lines[rank].receive())
        except EOFError:
            self._selector.unregister(self._lines[rank])
            self._miss(rank, "died")

    def _hear(self, rank: int, messages: list[list[Any]]) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "beat": lambda: None,
            "gave_up": lambda: self._gave_up.add(rank),
            "ended": lambda error: self._accuse(rank, f"ended with {error}"),
            "left": lambda: self._left.add(rank),
        }
        for word, *more in messages:
            answers[word](*more)

    def _beat(self) -> None:
        self._send_all("beat")
        self._beats_sent += 1
        for rank, line in self._lines.items():
            line.silent_beats += 1
            if line.silent_beats > self._pulse.limit_beats + 1:
                self._miss(rank, f"died or hangs (silent for {self._limit:g} s)")
        if self._beats_sent >= self._pulse.limit_beats:
            for rank in self._all - self._lines.keys():
                self._accuse(rank, f"did not come within {self._limit:g} s")

    def _miss(self, rank: int, fate: str) -> None:
        """Does without a rank that only looked on; accuses any other."""
        if rank not in self._onlookers:
            self._accuse(rank, fate)

    def _accuse(self, rank: int, fate: str) -> None:
        """Records a lost rank, unless it is recorded already or has left."""
        if rank not in self._left:
            self._lost.setdefault(rank, fate)

    def _in_doubt(self) -> bool:
        return bool(self._lost or self._gave_up)

    def _conclude(self) -> None:
        """Sends the outcome to all ranks as soon as it is known: all left, or some lost."""
        if self._left == self._all:
            self._end_with("left")
        elif self._in_doubt():
            self._doubt_since = self._doubt_since or time.monotonic()
            silent = self._all - self._lost.keys() - self._gave_up - self._left
            patience = _MORE_SECONDS if self._lost else GRACE_SECONDS
            if not silent or time.monotonic() - self._doubt_since >= patience:
                unanswered = dict.fromkeys(silent, f"died or hangs (no answer within {GRACE_SECONDS:g} s)")
                self._end_with("lost", sorted((self._lost or unanswered).items()))

    def _end_with(self, *words: Any) -> None:
        self._over = True
        self._send_all(*words)

    def _send_all(self, *words: Any) -> None:
        for rank in sorted(self._lines, reverse=True):  # rank 0 last: then it may end, and the board with it
            self._lines[rank].send(*words)


def _listen(size: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)
