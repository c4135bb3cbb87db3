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
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from megahead.background import submit
from megahead.errors import UserError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that ranks have to report after one gave up waiting, and then to end by themselves."""

_SETTLE_SECONDS = 1.0
"""Seconds to wait for further lost ranks after the first, since ranks seldom die alone."""


class LostRankError(UserError):
    """Other ranks died, hang, or failed."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        """`lost`: from rank to what became of it. The sentence: rank 1 died; ranks 2, 3 did not come within 60 s."""
        self.lost = lost
        reasons: dict[str, list[int]] = {}
        for rank, reason in lost.items():
            reasons.setdefault(reason, []).append(rank)
        who = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {reason}" for reason, ranks in reasons.items()
        ]
        found = "; ".join(who) or "each waits for the others"
        super().__init__(f"all ranks must take part in the run, but {found}; start again to resume.")


def is_communication_error(error: BaseException) -> bool:
    """Whether torch raised `error` because other ranks do not take part; only some of these errors have a type."""
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    by_text = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return isinstance(error, dist.DistError) or by_text


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """`function()`, or TimeoutError after `seconds`; the call then continues in a thread that nobody waits for.

    For requests to a store: if the process that serves it is suspended, torch waits forever, whatever its own limit.
    """
    try:
        return submit(function).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


# Short JSON messages over TCP, and heartbeats.


_MAX_MESSAGE_BYTES = 1 << 20
"""Bytes; what is longer is not our format."""


def heartbeats(limit_seconds: float) -> tuple[float, int]:
    """Seconds from one heartbeat to the next, and how many there are in `limit_seconds`.

    Silence is counted in one's own heartbeats, not in seconds, so that a process that was suspended for a while does
    not take the others for lost when it continues.
    """
    every = min(limit_seconds / 10, 15.0)
    return every, ceil(limit_seconds / every)


class Connection:
    """One end of a TCP connection for JSON messages. The other end is lost if it is silent for `limit_seconds`, and its
    machine for `host_timeout_seconds`, if that is given: a process that is suspended is silent, but its machine
    answers. Sending blocks for a second at most, even then."""

    def __init__(self, to: socket.socket, limit_seconds: float, host_timeout_seconds: float | None = None) -> None:
        to.settimeout(1)
        if host_timeout_seconds is not None:
            _enable_keepalive(to, host_timeout_seconds)
        self._socket, self._sending, self.limit_seconds = to, threading.Lock(), limit_seconds

    def send(self, *words: Any) -> None:
        """Sends one message, from any thread; it is lost if the other end is gone."""
        with self._sending, suppress(OSError):
            self._socket.sendall(json.dumps(words).encode() + b"\n")

    def messages(self) -> Iterator[list[Any]]:
        """The messages that arrive; sends heartbeats meanwhile. The last one is made here, when the other end is lost
        or sends something that is not our format: `gone`, and what became of it."""
        every, limit_beats = heartbeats(self.limit_seconds)
        next_beat, silent_beats, rest = time.monotonic() + every, 0, b""
        while silent_beats <= limit_beats + 1:
            try:
                if wait([self._socket], max(0, next_beat - time.monotonic())):
                    received = self._socket.recv(1 << 16)
                    *complete, rest = (rest + received).split(b"\n")
                    messages = [[word, *more] for word, *more in map(json.loads, complete)]
                    if not received or len(rest) > _MAX_MESSAGE_BYTES:
                        raise EOFError
                    silent_beats = 0
                    yield from (message for message in messages if message != ["beat"])
            except (OSError, EOFError, ValueError, TypeError, RecursionError):
                yield ["gone", "died"]
                return
            if time.monotonic() >= next_beat:
                next_beat, silent_beats = time.monotonic() + every, silent_beats + 1
                self.send("beat")
        yield ["gone", f"died or hangs (silent for {self.limit_seconds:g} s)"]

    def close(self) -> None:
        """Closes the connection, which the other end notices."""
        self._socket.close()


def _enable_keepalive(connection: socket.socket, seconds: float) -> None:
    """Breaks `connection` when the machine at the other end is silent for `seconds`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", seconds / 4), ("KEEPINTVL", seconds / 4), ("USER_TIMEOUT", 1000 * seconds)):
        if hasattr(socket, f"TCP_{option}"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), ceil(value))


# The monitor, in rank 0's process: a thread for each rank notes what is received, and one concludes.


class RankMonitor:
    """Expects `size` ranks within `limit_seconds`; listens, from now on, until all have left or one is lost.

    `spare_ranks`: as many ranks beyond these receive the outcome. Nobody waits for them, and they may be lost.
    `host_timeout_seconds`: a machine that is silent for that long is lost; by default only its ranks' silence counts.
    """

    def __init__(
        self, size: int, limit_seconds: float, spare_ranks: int = 0, host_timeout_seconds: float | None = None
    ) -> None:
        self._all, self._spare_ranks = frozenset(range(size)), frozenset(range(size, size + spare_ranks))
        self._limits = limit_seconds, host_timeout_seconds
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=size + spare_ranks, dualstack_ipv6=dual)
        self.address = f"{self._listener.getsockname()[1]} {secrets.token_hex(8)}"
        """Port and password for the ranks."""
        self._connections, self._over = dict[int, Connection](), False
        self._gave_up, self._left, self._lost = set[int](), set[int](), dict[int, str]()
        self._changed = threading.Condition()
        """Guards all of these, and tells the thread that concludes."""
        self._start("rank monitor's listener", self._accept)
        self._start("rank monitor", self._conclude)

    def _start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            while not self._over and self._connections.keys() != self._all | self._spare_ranks:
                if wait([self._listener], 1):
                    connection = Connection(self._listener.accept()[0], *self._limits)
                    self._start("rank monitor's connection", self._receive, connection)

    def _receive(self, connection: Connection) -> None:
        """Notes what one rank sends; a connection from anything else is closed."""
        rank: int | None = None
        for message in connection.messages():
            with self._changed:
                if rank is not None:
                    self._record(rank, *message)
                else:
                    expected = (self._all | self._spare_ranks) - self._connections.keys()
                    rank = next((each for each in expected if message == ["hello", self.address, each]), None)
                    if rank is None:
                        return connection.close()
                    self._connections[rank] = connection
                self._changed.notify()

    def _record(self, rank: int, word: str, reason: str = "") -> None:
        if word == "gave_up":
            self._gave_up.add(rank)
        elif word == "left":
            self._left.add(rank)
        elif rank not in self._left and (word == "ended" or rank in self._all):  # else `gone`, which spare ranks may be
            self._lost.setdefault(rank, reason)

    def _conclude(self) -> None:
        """Sends the outcome to all ranks as soon as it is known: all left, or some lost."""
        with self._changed:
            wait_for, limit = self._changed.wait_for, self._limits[0]
            every, limit_beats = heartbeats(limit)
            begun = (wait_for(lambda: self._all_came() or self._in_doubt(), every) for _ in range(limit_beats))
            if not any(begun):
                absent = self._all - self._connections.keys()
                self._lost |= dict.fromkeys(absent, f"did not come within {limit:g} s")
            if self._all_came():
                self._send_all("here")
            wait_for(lambda: self._left == self._all or self._in_doubt())
            wait_for(lambda: self._lost or not self._silent(), GRACE_SECONDS)
            wait_for(lambda: not self._silent(), _SETTLE_SECONDS if self._lost else 0)
            unanswered = dict.fromkeys(self._silent(), f"died or hangs (no answer within {GRACE_SECONDS:g} s)")
            lost = sorted((self._lost or unanswered).items())
            self._send_all("left") if self._left == self._all else self._send_all("lost", lost)
            self._over = True

    def _all_came(self) -> bool:
        return self._connections.keys() >= self._all

    def _in_doubt(self) -> bool:
        return bool(self._lost or self._gave_up)

    def _silent(self) -> frozenset[int]:
        """Ranks that have neither left nor reported why they will not."""
        return self._all - self._lost.keys() - self._gave_up - self._left

    def _send_all(self, *words: Any) -> None:
        for rank in sorted(self._connections, reverse=True):  # rank 0 last: then it may end, and the monitor with it
            self._connections[rank].send(*words)


# A rank's end of its connection to the monitor.


def connect(host: str, address: str, rank: int, limit_seconds: float, host_timeout_seconds: float | None) -> Connection:
    """Rank `rank`'s connection to the monitor on `host`."""
    to = socket.create_connection((host, int(address.split()[0])), min(limit_seconds, 60))
    connection = Connection(to, limit_seconds, host_timeout_seconds)
    connection.send("hello", address, rank)
    return connection


class MonitorClient:
    """Rank `rank`'s end of its connection. A thread reads it, and calls `end_process` with the reason, if it must."""

    def __init__(self, connection: Connection, rank: int, end_process: Callable[[str], None]) -> None:
        self._connection, self._rank, self._end_process = connection, rank, end_process
        self._ends, self._received = threading.Event(), SimpleQueue[str | dict[int, str]]()
        threading.Thread(target=self._listen, name="rank monitor's client", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until all ranks are connected; LostRankError names those that are too late."""
        self._expect(None)  # rank 0 enforces the limit, and the thread notices if rank 0 is lost

    def finish(self) -> None:
        """Waits until all ranks are finished; LostRankError names those that are too late."""
        self._connection.send("left")
        self._expect(self._connection.limit_seconds)

    def stand_by(self) -> None:
        """For a spare rank: waits until the others have left; LostRankError if they end otherwise."""
        while self._expect(None) != "left":
            pass

    @contextmanager
    def explain_lost_ranks(self) -> Iterator[None]:
        """Inside, a failed wait for other ranks becomes a LostRankError that names them; any other error is reported to
        them. If a rank is lost and a wait does not end, the process is ended."""
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            waited = is_communication_error(error)
            report = ("gave_up",) if waited else ("ended", f"ended with {type(error).__name__}: {error}")
            lost = self._report(*report)
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
        for word, *more in self._connection.messages():
            if word in ("lost", "gone"):  # with rank 0
                lost = dict(more[0]) if word == "lost" else {0: more[0]}
                self._received.put(lost)
                self._end(lost)
                break
            self._received.put(word)
            if word == "left":
                break
        self._connection.close()

    def _end(self, lost: dict[int, str]) -> None:
        if self._ends.wait(GRACE_SECONDS):
            return
        if self._rank in lost:
            traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
        self._end_process(str(LostRankError(lost)))
