"""Finds ranks that are lost or hang, and ends those that wait for them, with a sentence."""

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
from threading import Lock
from typing import Any, TypeVar

import torch.distributed as dist

from megahead.background import begin
from megahead.errors import UserError

# A line: a TCP connection for short JSON messages. When one process dies, the other end is closed at once.


class Connection:
    """One end of a line. No call blocks for more than a second, even if the other process is suspended."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1)
        self._connection, self._rest, self._speaking = connection, b"", Lock()
        self.silent_beats = 0
        """Beats since the last message, counted by the caller; see `Heartbeat`."""

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


class Heartbeat:
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


# Runs on rank 0, to which every rank has a connection (a line): finds out which ranks are lost, and tells the others.
#
# A rank that dies is noticed at once, because its line breaks; one that is suspended, or whose machine is gone, after
# it was silent for the time limit. A rank that hangs still sends heartbeats (beats) from its thread: it is found when
# another rank reports that it gave up waiting, and this one reports nothing within GRACE_SECONDS.


GRACE_SECONDS = 5.0
"""Seconds that ranks have to report after one gave up waiting, and then to end by themselves."""

_MORE_SECONDS = 1.0
"""Seconds to wait for further lost ranks after the first, since ranks seldom die alone."""


class RankMonitor:
    """Expects `size` ranks within `limit_seconds`; listens until all have left or one is lost.

    `spectators`: as many ranks beyond these are told how it ends. Nobody waits for them, and they may be lost.
    `host_timeout_seconds`: a machine that is silent for that long is lost; by default only its ranks' silence counts.
    """

    def __init__(
        self, size: int, limit_seconds: float, spectators: int = 0, host_timeout_seconds: float | None = None
    ) -> None:
        self._all, self._limit = frozenset(range(size)), limit_seconds
        self._spectators = frozenset(range(size, size + spectators))
        self._door, self._token = _listen(size + spectators), secrets.token_hex(8)
        if host_timeout_seconds is not None:
            notice_lost_host(self._door, host_timeout_seconds)
        self._lines: dict[int, Connection] = {}
        self._gave_up: set[int] = set()
        self._left: set[int] = set()
        self._lost: dict[int, str] = {}
        self._pulse, self._beats_sent = Heartbeat(limit_seconds), -1
        self._doubt_since, self._over = 0.0, False
        self._selector = DefaultSelector()
        self._selector.register(self._door, EVENT_READ, self._admit)

    @property
    def address(self) -> str:
        """Port and password for the other ranks."""
        return f"{self._door.getsockname()[1]} {self._token}"

    def start(self) -> Connection:
        """Begins to listen, in a thread; returns rank 0's own line."""
        here, mine = socket.socketpair()
        self._add_line(0, Connection(here))
        threading.Thread(target=self._serve, name="switchboard", daemon=True).start()
        return Connection(mine)

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
        line = Connection(connection)
        self._selector.register(line, EVENT_READ, lambda: self._greet(line))

    def _greet(self, line: Connection) -> None:
        """Reads a rank's first messages; connections from anything else are closed."""
        self._selector.unregister(line)
        try:
            (_, token, rank), *more = line.receive()
        except (EOFError, ValueError, TypeError):
            token, rank, more = "", 0, []
        if token == self._token and rank in (self._all | self._spectators) - self._lines.keys():
            self._add_line(rank, line)
            self._hear(rank, more)
        else:
            line.close()

    def _add_line(self, rank: int, line: Connection) -> None:
        self._lines[rank] = line
        self._selector.register(line, EVENT_READ, lambda: self._listen_to(rank))
        if rank in self._all and self._lines.keys() >= self._all:
            self._send_all("here")
        if self._lines.keys() == self._all | self._spectators:
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
        if rank not in self._spectators:
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


# Waiting for other ranks in torch: which errors that raises, and a time limit for calls that have none.


T = TypeVar("T")


def is_waiting_error(error: BaseException) -> bool:
    """Whether torch raised `error` because other ranks do not take part; only some of these errors have a type."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """`function()`, or TimeoutError after `seconds`; the call then continues in a thread that nobody waits for.

    For requests to a store: if the process that serves it is suspended, torch waits forever, whatever its own limit.
    """
    try:
        return begin(function).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


# Lost ranks: when a rank dies or hangs, the others report which one it was, and end.
#
# Without this, waiting for a rank that died may fail at once (gloo), fail after a time limit with a RuntimeError that
# names no rank, or never end: a store whose process is suspended does not answer, and NCCL's kernels keep waiting. So
# every rank has a `Connection` to rank 0 from the rendezvous to the end, and a thread that reads it. When a rank is
# lost, the others learn its number; one that still waits `GRACE_SECONDS` later is ended.


class LostRankError(UserError):
    """Other ranks died, hang, or failed."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        """`lost`: from rank to what became of it."""
        self.lost = lost
        super().__init__(f"all ranks must take part in the run, but {_describe_lost(lost)}; start again to resume.")


class MonitorClient:
    """Rank `rank`'s end of its line to rank 0. The thread calls `end_process` with the reason, if it must."""

    def __init__(self, line: Connection, rank: int, limit_seconds: float, end_process: Callable[[str], None]) -> None:
        self._line, self._rank, self._limit, self._end_process = line, rank, limit_seconds, end_process
        self._received: SimpleQueue[str | dict[int, str]] = SimpleQueue()
        self._ends = threading.Event()
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until all ranks are connected; LostRankError names those that are too late."""
        self._expect(None)  # rank 0 enforces the limit, and the thread notices if rank 0 is lost

    def leave(self) -> None:
        """Waits until all ranks are finished; LostRankError names those that are too late."""
        self._line.send("left")
        self._expect(self._limit)

    def spectate(self) -> None:
        """For a rank that only looks on: waits until the others have left; LostRankError if they end otherwise."""
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
            lost = self._ask("gave_up") if waited else self._ask("ended", f"{type(error).__name__}: {error}")
            if not waited or not lost:
                raise
            raise LostRankError(lost) from error

    def _expect(self, seconds: float | None) -> str:
        """Waits for rank 0's message that all ranks got here; LostRankError if it reports lost ranks instead."""
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            received = self._ask("gave_up")
        if isinstance(received, dict):
            self._ends.set()
            raise LostRankError(received)
        return received

    def _ask(self, *words: str) -> dict[int, str]:
        """Reports why this rank ends; returns the lost ranks, from rank to what became of it."""
        self._ends.set()
        self._line.send(*words)
        try:
            received = self._received.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            received = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return received if isinstance(received, dict) else {}

    def _listen(self) -> None:
        """The thread: reads messages until all ranks have left, or some are lost."""
        for word, *more in self._messages():
            if word == "lost":
                return self._end(dict(more[0]))
            self._received.put(word)
            if word == "left":
                return None

    def _messages(self) -> Iterator[list[Any]]:
        """Rank 0's messages; the last may be made here, when rank 0 itself died or was silent for too long."""
        pulse, selector = Heartbeat(self._limit), DefaultSelector()
        selector.register(self._line, EVENT_READ)
        while self._line.silent_beats <= pulse.limit_beats + 1:
            try:
                messages = self._line.receive() if selector.select(pulse.pause()) else []
            except EOFError:
                yield ["lost", [[0, "died"]]]
                return
            yield from (message for message in messages if message != ["beat"])
            if pulse.due():
                self._line.silent_beats += 1
                self._line.send("beat")
        yield ["lost", [[0, f"died or hangs (silent for {self._limit:g} s)"]]]

    def _end(self, lost: dict[int, str]) -> None:
        """Ends the process unless the main thread does so within `GRACE_SECONDS`. If this rank itself is the lost one,
        prints the stack of its main thread first."""
        self._received.put(lost)
        if not self._ends.wait(GRACE_SECONDS):
            if self._rank in lost:
                traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
            self._end_process(str(LostRankError(lost)))


def _describe_lost(lost: Mapping[int, str]) -> str:
    """A sentence such as: rank 1 died; ranks 2, 3 did not come within 60 s."""
    fates: dict[str, list[int]] = {}
    for rank, fate in lost.items():
        fates.setdefault(fate, []).append(rank)
    who = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {fate}" for fate, ranks in fates.items()]
    return "; ".join(who) or "each waits for the others"
