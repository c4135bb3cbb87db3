"""Finds ranks that are lost or hang, and ends those that wait for them, with a sentence.

Without this, waiting for a rank that died may fail at once (gloo), fail after a time limit with a RuntimeError that
names no rank, or never end: a store whose process is suspended does not answer, and NCCL's kernels keep waiting. So
every rank has a TCP connection to a monitor at rank 0 from the rendezvous to the end. A rank that dies is noticed at
once, because its connection breaks; one that is suspended, or whose machine is gone, when its heartbeats have been
missing for the time limit; one that hangs, whose thread still sends heartbeats, when another rank reports that it gave
up waiting and this one reports nothing within GRACE_SECONDS. The monitor tells all ranks who is lost, and one that
still waits GRACE_SECONDS later is ended.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil
from queue import Empty, SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any, TypeVar

import torch.distributed as dist

from megahead.background import begin
from megahead.errors import UserError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that ranks have to report after one gave up waiting, and then to end by themselves."""

_MORE_SECONDS = 1.0
"""Seconds to wait for further lost ranks after the first, since ranks seldom die alone."""


class LostRankError(UserError):
    """Other ranks died, hang, or failed."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        """`lost`: from rank to what became of it. The sentence: rank 1 died; ranks 2, 3 did not come within 60 s."""
        self.lost = lost
        fates: dict[str, list[int]] = {}
        for rank, fate in lost.items():
            fates.setdefault(fate, []).append(rank)
        who = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {fate}" for fate, ranks in fates.items()]
        found = "; ".join(who) or "each waits for the others"
        super().__init__(f"all ranks must take part in the run, but {found}; start again to resume.")


def is_waiting_error(error: BaseException) -> bool:
    """Whether torch raised `error` because other ranks do not take part; only some of these errors have a type."""
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    by_text = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return isinstance(error, dist.DistError) or by_text


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """`function()`, or TimeoutError after `seconds`; the call then continues in a thread that nobody waits for.

    For requests to a store: if the process that serves it is suspended, torch waits forever, whatever its own limit.
    """
    try:
        return begin(function).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


# Short JSON messages over TCP, and heartbeats.


class Connection:
    """One end of a TCP connection for JSON messages. No call blocks for more than a second, even if the other process
    is suspended."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1)
        self._connection, self._rest, self._sending = connection, b"", threading.Lock()
        self.silent_beats = 0
        """Heartbeats since the last message, counted by the caller; see `Heartbeat`."""

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, *words: Any) -> None:
        """Sends one message, from any thread; it is lost if the other end is gone."""
        with self._sending, suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived; call it when `select` finds the connection readable. EOFError when the other
        end is gone, or sends something that is not our format."""
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


class Heartbeat:
    """When to send a heartbeat, so that silence means that the other end is lost.

    Silence is counted in this process's own heartbeats, not in seconds, so that a process that was suspended for a
    while does not take the others for lost when it continues.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._every, self._next = min(limit_seconds / 10, 15.0), time.monotonic()
        self.limit_beats = ceil(limit_seconds / self._every)
        """Heartbeats in `limit_seconds`."""

    def pause(self) -> float:
        """Seconds until the next heartbeat."""
        return max(0.0, self._next - time.monotonic())

    def due(self) -> bool:
        """Whether it is time for a heartbeat; True once for each."""
        if self.pause():
            return False
        self._next = time.monotonic() + self._every
        return True


# The monitor, a thread of rank 0's process.


class RankMonitor:
    """Expects `size` ranks within `limit_seconds`; listens until all have left or one is lost.

    `spectators`: as many ranks beyond these receive the outcome. Nobody waits for them, and they may be lost.
    `host_timeout_seconds`: a machine that is silent for that long is lost; by default only its ranks' silence counts.
    """

    def __init__(
        self, size: int, limit_seconds: float, spectators: int = 0, host_timeout_seconds: float | None = None
    ) -> None:
        self._all, self._limit = frozenset(range(size)), limit_seconds
        self._spectators = frozenset(range(size, size + spectators))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=size + spectators, dualstack_ipv6=dual)
        if host_timeout_seconds is not None:
            notice_lost_host(self._listener, host_timeout_seconds)
        self._token, self._connections = secrets.token_hex(8), dict[int, Connection]()
        self._gave_up, self._left, self._lost = set[int](), set[int](), dict[int, str]()
        self._heartbeat, self._beats_sent = Heartbeat(limit_seconds), -1
        self._doubt_since, self._over = 0.0, False
        self._selector = DefaultSelector()
        self._selector.register(self._listener, EVENT_READ, self._accept)

    @property
    def address(self) -> str:
        """Port and password for the other ranks."""
        return f"{self._listener.getsockname()[1]} {self._token}"

    def start(self) -> Connection:
        """Begins to listen, in a thread; returns rank 0's own connection."""
        here, mine = socket.socketpair()
        self._add(0, Connection(here))
        threading.Thread(target=self._serve, name="rank monitor", daemon=True).start()
        return Connection(mine)

    def _serve(self) -> None:
        while not self._over:
            pause = self._heartbeat.pause()
            for key, _ in self._selector.select(min(pause, 0.1) if self._lost or self._gave_up else pause):
                key.data()
            if self._heartbeat.due():
                self._beat()
            self._conclude()

    def _accept(self) -> None:
        connection = Connection(self._listener.accept()[0])
        self._selector.register(connection, EVENT_READ, lambda: self._greet(connection))

    def _greet(self, connection: Connection) -> None:
        """Reads a rank's first messages; connections from anything else are closed."""
        self._selector.unregister(connection)
        try:
            (_, token, rank), *more = connection.receive()
        except (EOFError, ValueError, TypeError):
            token, rank, more = "", 0, []
        if token == self._token and rank in (self._all | self._spectators) - self._connections.keys():
            self._add(rank, connection)
            self._handle(rank, more)
        else:
            connection.close()

    def _add(self, rank: int, connection: Connection) -> None:
        self._connections[rank] = connection
        self._selector.register(connection, EVENT_READ, lambda: self._receive(rank))
        if rank in self._all and self._connections.keys() >= self._all:
            self._send_all("here")
        if self._connections.keys() == self._all | self._spectators:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _receive(self, rank: int) -> None:
        try:
            self._handle(rank, self._connections[rank].receive())
        except EOFError:
            self._selector.unregister(self._connections[rank])
            self._record_lost(rank, "died")

    def _handle(self, rank: int, messages: list[list[Any]]) -> None:
        for word, *more in messages:
            if word == "gave_up":
                self._gave_up.add(rank)
            elif word == "left":
                self._left.add(rank)
            elif word == "ended" and rank not in self._left:
                self._lost.setdefault(rank, f"ended with {more[0]}")

    def _beat(self) -> None:
        self._send_all("beat")
        self._beats_sent += 1
        for rank, connection in self._connections.items():
            connection.silent_beats += 1
            if connection.silent_beats > self._heartbeat.limit_beats + 1:
                self._record_lost(rank, f"died or hangs (silent for {self._limit:g} s)")
        if self._beats_sent >= self._heartbeat.limit_beats:
            for rank in self._all - self._connections.keys():
                self._record_lost(rank, f"did not come within {self._limit:g} s")

    def _record_lost(self, rank: int, fate: str) -> None:
        """Records a lost rank, unless it is recorded already, has left, or is a spectator."""
        if rank not in self._left | self._spectators:
            self._lost.setdefault(rank, fate)

    def _conclude(self) -> None:
        """Sends the outcome to all ranks as soon as it is known: all left, or some lost."""
        if self._left == self._all:
            self._over = True
            self._send_all("left")
        elif self._lost or self._gave_up:
            self._doubt_since = self._doubt_since or time.monotonic()
            silent = self._all - self._lost.keys() - self._gave_up - self._left
            patience = _MORE_SECONDS if self._lost else GRACE_SECONDS
            if not silent or time.monotonic() - self._doubt_since >= patience:
                unanswered = dict.fromkeys(silent, f"died or hangs (no answer within {GRACE_SECONDS:g} s)")
                self._over = True
                self._send_all("lost", sorted((self._lost or unanswered).items()))

    def _send_all(self, *words: Any) -> None:
        for rank in sorted(self._connections, reverse=True):  # rank 0 last: then it may end, and the monitor with it
            self._connections[rank].send(*words)


# A rank's end of its connection to the monitor.


class MonitorClient:
    """Rank `rank`'s end of its connection. A thread reads it, and calls `end_process` with the reason, if it must."""

    def __init__(
        self, connection: Connection, rank: int, limit_seconds: float, end_process: Callable[[str], None]
    ) -> None:
        self._connection, self._rank, self._limit = connection, rank, limit_seconds
        self._end_process, self._ends = end_process, threading.Event()
        self._received: SimpleQueue[str | dict[int, str]] = SimpleQueue()
        threading.Thread(target=self._listen, name="rank monitor's client", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until all ranks are connected; LostRankError names those that are too late."""
        self._expect(None)  # rank 0 enforces the limit, and the thread notices if rank 0 is lost

    def leave(self) -> None:
        """Waits until all ranks are finished; LostRankError names those that are too late."""
        self._connection.send("left")
        self._expect(self._limit)

    def spectate(self) -> None:
        """For a spectator: waits until the others have left; LostRankError if they end otherwise."""
        while self._expect(None) != "left":
            pass

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Inside, a failed wait for other ranks becomes a LostRankError that names them; any other error is reported to
        them. If a rank is lost and a wait does not end, the process is ended."""
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            waited = is_waiting_error(error)
            lost = self._report("gave_up") if waited else self._report("ended", f"{type(error).__name__}: {error}")
            if not waited or not lost:
                raise
            raise LostRankError(lost) from error

    def _expect(self, seconds: float | None) -> str:
        """Waits for the monitor's message that all ranks got here; LostRankError if it reports lost ranks instead."""
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            received = self._report("gave_up")
        if isinstance(received, dict):
            self._ends.set()
            raise LostRankError(received)
        return received

    def _report(self, *words: str) -> dict[int, str]:
        """Reports why this rank ends; returns the lost ranks, from rank to what became of it."""
        self._ends.set()
        self._connection.send(*words)
        try:
            received = self._received.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            received = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return received if isinstance(received, dict) else {}

    def _listen(self) -> None:
        """The thread: reads messages until all ranks have left, or some are lost. Then it ends the process unless the
        main thread does so within GRACE_SECONDS; if this rank is the lost one, with the stack of its main thread."""
        for word, *more in self._messages():
            if word != "lost":
                self._received.put(word)
                if word == "left":
                    return
                continue
            lost: dict[int, str] = dict(more[0])
            self._received.put(lost)
            if not self._ends.wait(GRACE_SECONDS):
                if self._rank in lost:
                    traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
                self._end_process(str(LostRankError(lost)))
            return

    def _messages(self) -> Iterator[list[Any]]:
        """The monitor's messages; the last may be made here, when rank 0 itself died or was silent for too long."""
        heartbeat, selector = Heartbeat(self._limit), DefaultSelector()
        selector.register(self._connection, EVENT_READ)
        while self._connection.silent_beats <= heartbeat.limit_beats + 1:
            try:
                messages = self._connection.receive() if selector.select(heartbeat.pause()) else []
            except EOFError:
                yield ["lost", [[0, "died"]]]
                return
            yield from (message for message in messages if message != ["beat"])
            if heartbeat.due():
                self._connection.silent_beats += 1
                self._connection.send("beat")
        yield ["lost", [[0, f"died or hangs (silent for {self._limit:g} s)"]]]
