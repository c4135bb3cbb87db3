"""Detects ranks that died or hang, and ends the ranks that wait for them with an error that names them.

Without this, waiting for a dead rank may fail at once (gloo), fail after a timeout with a RuntimeError that names no
rank, or never end: a TCPStore whose process is suspended does not answer, and NCCL's kernels keep waiting. So every
rank has a TCP connection to a monitor at rank 0 from the rendezvous to the end of the run.

- A rank that dies is detected at once, because its connection breaks.
- A rank that is suspended, or whose machine is down, is detected when its heartbeats have been missing for the timeout.
- A rank that hangs still sends heartbeats from its thread. It is detected when another rank reports a timeout, and
  the hanging one reports nothing within GRACE_SECONDS.

The monitor sends the lost ranks to all others, and ends a process that still waits GRACE_SECONDS later.
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
from megahead.wording import format_numbers, print_line

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that ranks have to report after one of them timed out, and then to end by themselves."""

_SETTLE_SECONDS = 1.0
"""Seconds to wait for further lost ranks after the first, since several ranks often die together."""


class LostRankError(UserError):
    """Other ranks died, hang, or failed."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        """`lost`: the reason for each lost rank. Example: rank 1 died; ranks 2, 3 did not come within 60 s."""
        self.lost = lost
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, reason in lost.items():
            ranks_by_reason.setdefault(reason, []).append(rank)
        sentences = [f"{format_numbers('rank', ranks)} {reason}" for reason, ranks in ranks_by_reason.items()]
        problem = "; ".join(sentences) or "each waits for the others"
        super().__init__(f"all ranks must take part in the run, but {problem}; start again to resume.")


def is_communication_error(error: BaseException) -> bool:
    """Whether torch raised `error` because other ranks do not respond; not all of these errors have their own type."""
    texts = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "Broken pipe", "timed out")
    matches_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return isinstance(error, dist.DistError) or matches_text


def with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Returns `function()`; TimeoutError after `seconds`, while the call continues in a daemon thread. For requests to
    a store: if the process that serves it is suspended, torch waits forever despite its own timeout."""
    try:
        return submit(function).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


# Short JSON messages over TCP, and heartbeats. A message is a list of its type and arguments.


_MAX_MESSAGE_BYTES = 1 << 20


def heartbeat_schedule(timeout_seconds: float) -> tuple[float, int]:
    """The heartbeat interval in seconds, and the number of heartbeats in `timeout_seconds`. A process measures the
    other end's silence in its own heartbeats, not in seconds: after being suspended itself, it does not consider the
    others lost."""
    interval = min(timeout_seconds / 10, 15.0)
    return interval, ceil(timeout_seconds / interval)


class Connection:
    """One end of a TCP connection for JSON messages. The other end is lost if it sends nothing for `timeout_seconds`,
    or if its machine does not answer for `host_timeout_seconds` (a suspended process's machine answers). Sending blocks
    for at most a second."""

    def __init__(self, peer: socket.socket, timeout_seconds: float, host_timeout_seconds: float | None = None) -> None:
        peer.settimeout(1)
        if host_timeout_seconds is not None:
            _enable_keepalive(peer, host_timeout_seconds)
        self._socket, self._send_lock, self.timeout_seconds = peer, threading.Lock(), timeout_seconds

    def send(self, *message: Any) -> None:
        """Sends one message, from any thread; drops it if the other end has disconnected."""
        with self._send_lock, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[list[Any]]:
        """Yields the messages that arrive, and sends heartbeats in between.

        When the other end is lost or sends an invalid message, the last one yielded is ["disconnected", reason].
        """
        interval, max_silent_beats = heartbeat_schedule(self.timeout_seconds)
        next_beat, silent_beats, incomplete = time.monotonic() + interval, 0, b""
        while silent_beats <= max_silent_beats + 1:
            try:
                if wait([self._socket], max(0, next_beat - time.monotonic())):
                    received = self._socket.recv(1 << 16)
                    *complete, incomplete = (incomplete + received).split(b"\n")
                    messages = [[kind, *arguments] for kind, *arguments in map(json.loads, complete)]
                    if not received or len(incomplete) > _MAX_MESSAGE_BYTES:
                        raise EOFError
                    silent_beats = 0
                    yield from (message for message in messages if message != ["heartbeat"])
            except (OSError, EOFError, ValueError, TypeError, RecursionError):
                yield ["disconnected", "died"]
                return
            if time.monotonic() >= next_beat:
                next_beat, silent_beats = time.monotonic() + interval, silent_beats + 1
                self.send("heartbeat")
        yield ["disconnected", f"died or hangs (silent for {self.timeout_seconds:g} s)"]

    def close(self) -> None:
        """Closes the connection; the other end sees it as disconnected."""
        self._socket.close()


def _enable_keepalive(connection: socket.socket, seconds: float) -> None:
    """Breaks `connection` when the machine at the other end does not answer for `seconds`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", seconds / 4), ("KEEPINTVL", seconds / 4), ("USER_TIMEOUT", 1000 * seconds)):
        if hasattr(socket, f"TCP_{option}"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), ceil(value))


# The monitor, in rank 0's process: one thread per rank receives messages, and one decides the outcome.


class RankMonitor:
    """Waits `timeout_seconds` for `size` ranks to connect, then listens until all have finished or one is lost.
    `spare_ranks`: the number of further ranks, which only receive the outcome and may be lost. `host_timeout_seconds`:
    a machine that does not answer for so long is lost; None: only silent ranks are."""

    def __init__(
        self, size: int, timeout_seconds: float, spare_ranks: int = 0, host_timeout_seconds: float | None = None
    ) -> None:
        self._ranks, self._spare_ranks = frozenset(range(size)), frozenset(range(size, size + spare_ranks))
        self._timeout_seconds, self._host_timeout_seconds = timeout_seconds, host_timeout_seconds
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=size + spare_ranks, dualstack_ipv6=dual)
        self.address = f"{self._listener.getsockname()[1]} {secrets.token_hex(8)}"
        """Port and password for the ranks."""
        self._connections, self._is_done = dict[int, Connection](), False
        self._timed_out, self._finished, self._lost = set[int](), set[int](), dict[int, str]()
        self._changed = threading.Condition()
        """Guards all of these, and notifies the thread that decides the outcome."""
        self._start_thread("rank monitor's listener", self._accept)
        self._start_thread("rank monitor", self._decide_outcome)

    def _start_thread(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_done and self._connections.keys() != self._ranks | self._spare_ranks:
                if wait([self._listener], 1):
                    peer = self._listener.accept()[0]
                    connection = Connection(peer, self._timeout_seconds, self._host_timeout_seconds)
                    self._start_thread("rank monitor's connection", self._receive, connection)

    def _receive(self, connection: Connection) -> None:
        """Records the messages of one rank; closes a connection that does not start with a rank's hello."""
        rank: int | None = None
        for message in connection.messages():
            with self._changed:
                if rank is not None:
                    self._record(rank, *message)
                else:
                    expected = (self._ranks | self._spare_ranks) - self._connections.keys()
                    rank = next((rank for rank in expected if message == ["hello", self.address, rank]), None)
                    if rank is None:
                        return connection.close()
                    self._connections[rank] = connection
                self._changed.notify()

    def _record(self, rank: int, kind: str, reason: str = "") -> None:
        if kind == "timed_out":
            self._timed_out.add(rank)
        elif kind == "finished":
            self._finished.add(rank)
        elif rank not in self._finished and (kind == "failed" or rank in self._ranks):  # spare ranks may disconnect
            self._lost.setdefault(rank, reason)

    def _decide_outcome(self) -> None:
        """Sends the outcome to all ranks as soon as it is known: all finished, or some lost."""
        with self._changed:
            wait_for, timeout = self._changed.wait_for, self._timeout_seconds
            interval, max_beats = heartbeat_schedule(timeout)
            started = (
                wait_for(lambda: self._all_connected() or self._has_trouble(), interval) for _ in range(max_beats)
            )
            if not any(started):
                missing = self._ranks - self._connections.keys()
                self._lost |= dict.fromkeys(missing, f"did not come within {timeout:g} s")
            if self._all_connected():
                self._send_all("connected")
            wait_for(lambda: self._finished == self._ranks or self._has_trouble())
            wait_for(lambda: self._lost or not self._unreported(), GRACE_SECONDS)
            wait_for(lambda: not self._unreported(), _SETTLE_SECONDS if self._lost else 0)
            hanging = dict.fromkeys(self._unreported(), f"died or hangs (no answer within {GRACE_SECONDS:g} s)")
            lost = sorted((self._lost or hanging).items())
            self._send_all("finished") if self._finished == self._ranks else self._send_all("lost", lost)
            self._is_done = True

    def _all_connected(self) -> bool:
        return self._connections.keys() >= self._ranks

    def _has_trouble(self) -> bool:
        return bool(self._lost or self._timed_out)

    def _unreported(self) -> frozenset[int]:
        """Ranks that have neither finished nor reported an error."""
        return self._ranks - self._lost.keys() - self._timed_out - self._finished

    def _send_all(self, *message: Any) -> None:
        for rank in sorted(self._connections, reverse=True):  # rank 0 last: its process, the monitor's, may exit
            self._connections[rank].send(*message)


def connect(
    host: str, address: str, rank: int, timeout_seconds: float, host_timeout_seconds: float | None
) -> Connection:
    """Connects rank `rank` to the monitor on `host`."""
    peer = socket.create_connection((host, int(address.split()[0])), min(timeout_seconds, 60))
    connection = Connection(peer, timeout_seconds, host_timeout_seconds)
    connection.send("hello", address, rank)
    return connection


class MonitorClient:
    """Rank `rank`'s client. Its thread reads the connection; `end_process` is called with a reason if a rank is lost
    and the main thread does not end."""

    def __init__(self, connection: Connection, rank: int, end_process: Callable[[str], None]) -> None:
        self._connection, self._rank, self._end_process = connection, rank, end_process
        self._ending, self._received = threading.Event(), SimpleQueue[str | dict[int, str]]()
        threading.Thread(target=self._listen, name="rank monitor's client", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until all ranks are connected; LostRankError for those that are too late."""
        self._wait_for_message(None)  # rank 0 enforces the timeout, and the thread detects the loss of rank 0

    def finish(self) -> None:
        """Waits until all ranks are finished; LostRankError for those that are too late."""
        self._connection.send("finished")
        self._wait_for_message(self._connection.timeout_seconds)

    def stand_by(self) -> None:
        """For a spare rank: waits until the training ranks have finished; LostRankError if they do not."""
        while self._wait_for_message(None) != "finished":
            pass

    @contextmanager
    def explain_lost_ranks(self) -> Iterator[None]:
        """Turns a communication error in the block into a LostRankError; reports any other error to the other ranks.
        Ends the process if a rank is lost while the block keeps waiting."""
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            timed_out = is_communication_error(error)
            reason = f"ended with {type(error).__name__}: {error}".rstrip(".")
            report = ("timed_out",) if timed_out else ("failed", reason)
            lost = self._report(*report)
            if not timed_out or not lost:
                raise
            raise LostRankError(lost) from error

    def _wait_for_message(self, seconds: float | None) -> str:
        """Returns the monitor's next message; LostRankError if it reports lost ranks."""
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            lost = self._report("timed_out")
            received = "finished" if lost is None else lost
        if isinstance(received, dict):
            self._ending.set()
            raise LostRankError(received)
        return received

    def _report(self, *message: str) -> dict[int, str] | None:
        """Reports why this rank ends; returns the lost ranks with their reasons, or None if all ranks have finished
        meanwhile."""
        self._ending.set()
        self._connection.send(*message)
        try:
            received = self._received.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            received = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return received if isinstance(received, dict) else None

    def _listen(self) -> None:
        """Reads messages, in a thread, until all ranks have finished or some are lost."""
        for kind, *arguments in self._connection.messages():
            if kind in ("lost", "disconnected"):  # disconnected: from rank 0
                lost = dict(arguments[0]) if kind == "lost" else {0: arguments[0]}
                self._received.put(lost)
                self._end(lost)
                break
            self._received.put(kind)
            if kind == "finished":
                break
        self._connection.close()

    def _end(self, lost: dict[int, str]) -> None:
        """Ends the process unless the main thread does within GRACE_SECONDS; prints its stack if this rank is lost."""
        if self._ending.wait(GRACE_SECONDS):
            return
        if self._rank in lost:
            stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
            print_line("".join(stack), sys.stderr)
        self._end_process(str(LostRankError(lost)))
