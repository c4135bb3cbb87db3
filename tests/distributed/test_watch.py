"""The watch over ranks: who is named when some are lost, who is not, and that strangers do no harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from megahead.distributed import watchdog
from megahead.distributed.launch import Launch, _end_process, distributed_session
from megahead.distributed.watchdog import Connection, LostRankError, MonitorClient, RankMonitor, connect, with_timeout
from megahead.errors import UserError
from support.commands import free_port
from support.killable import codes

WAITED = RuntimeError("[gloo] timed out waiting")


class Ranks:
    """Ranks that are threads; `ended` holds what was said when a process would have been ended from within."""

    def __init__(self, size: int, limit_seconds: float = 60, absent: int = 0) -> None:
        self.ended: list[str] = []
        self.address, self._limit = RankMonitor(size, limit_seconds).address, limit_seconds
        self.lines = [self.call(rank) for rank in range(size - absent)]
        self.watches = [MonitorClient(line, rank, self.ended.append) for rank, line in enumerate(self.lines)]
        self._pool = ThreadPoolExecutor(size)

    def call(self, rank: int) -> Connection:
        return connect("127.0.0.1", self.address, rank, self._limit, None)

    def each(self, act: Callable[[MonitorClient], None], *ranks: int) -> list[Future[None]]:
        return [self._pool.submit(act, self.watches[rank]) for rank in ranks]

    def met(self) -> Ranks:
        for meeting in self.each(MonitorClient.wait_for_all, *range(len(self.lines))):
            meeting.result(10)
        return self


def raising(error: Exception) -> Callable[[MonitorClient], None]:
    def act(watch: MonitorClient) -> None:
        with watch.explain_lost_ranks():
            raise error

    return act


def outcome(future: Future[None]) -> str:
    error = future.exception(10)
    return f"{type(error).__name__}: {error}"


def lost(who: str) -> str:
    return f"LostRankError: all ranks must take part in the run, but {who}; start again to resume."


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog, "_SETTLE_SECONDS", 0.2)


@pytest.mark.parametrize("size", [2, 4])
def test_nobody_leaves_before_all_do(size: int) -> None:
    ranks = Ranks(size).met()
    early = ranks.each(MonitorClient.finish, *range(size - 1))
    time.sleep(0.2)
    assert not any(future.done() for future in early)
    assert [future.result(10) for future in (*early, *ranks.each(MonitorClient.finish, size - 1))] == [None] * size
    assert not ranks.ended


def test_who_does_not_come_is_named_by_who_came() -> None:
    ranks = Ranks(4, limit_seconds=0.5, absent=2)
    for meeting in ranks.each(MonitorClient.wait_for_all, 0, 1):
        assert outcome(meeting) == lost("ranks 2, 3 did not come within 0.5 s")


def test_who_dies_is_named_and_not_who_waits_for_it() -> None:
    ranks = Ranks(4).met()
    for rank in (2, 3):
        ranks.lines[rank]._socket.shutdown(socket.SHUT_RDWR)
    for waiting in ranks.each(raising(WAITED), 0, 1):
        assert outcome(waiting) == lost("ranks 2, 3 died")


def test_who_does_not_answer_is_named() -> None:
    ranks = Ranks(4).met()
    for waiting in ranks.each(raising(WAITED), 0, 1, 3):
        assert outcome(waiting) == lost("rank 2 died or hangs (no answer within 0.5 s)")


def test_who_is_not_heard_is_named_although_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, limit_seconds=0.5).met()
    monkeypatch.setattr(ranks.lines[2], "send", lambda *words: None)
    deadline = time.monotonic() + 10
    while len(ranks.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "rank 2 died or hangs (silent for 0.5 s)" in ranks.ended[0]


def test_who_fails_keeps_its_error_and_the_others_learn_it() -> None:
    ranks = Ranks(3).met()
    (failing,) = ranks.each(raising(ValueError("too small.")), 1)
    assert outcome(failing) == "ValueError: too small."
    for waiting in ranks.each(raising(WAITED), 0, 2):
        assert outcome(waiting) == lost("rank 1 ended with ValueError: too small")


def test_all_that_fail_alike_keep_their_error() -> None:
    ranks = Ranks(3).met()
    for failing in ranks.each(raising(ValueError("too small")), 0, 1, 2):
        assert outcome(failing) == "ValueError: too small"


def test_an_error_of_the_network_that_all_have_stays_what_it_is() -> None:
    ranks = Ranks(2).met()
    for waiting in ranks.each(raising(WAITED), 0, 1):
        assert outcome(waiting) == f"RuntimeError: {WAITED}"


def test_when_rank_0_dies_it_is_named() -> None:
    ranks = Ranks(2).met()
    ranks.lines[1]._socket.shutdown(socket.SHUT_RD)  # as when the other end is gone
    (waiting,) = ranks.each(raising(WAITED), 1)
    assert outcome(waiting) == lost("rank 0 died")


def test_a_wait_that_does_not_end_ends_the_process() -> None:
    ranks = Ranks(2).met()
    ranks.lines[1]._socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 30
    while len(ranks.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lost("rank 1 died") in [f"LostRankError: {sentence}" for sentence in ranks.ended]


def test_a_process_ends_also_where_nothing_can_be_printed() -> None:
    """Its log is on a full disk; the rank hangs itself, which prints its stack, too."""

    def hang() -> None:
        for output in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), output)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        print("before")  # and not flushed
        connection = connect("127.0.0.1", RankMonitor(1, 60).address, 0, 60, None)
        MonitorClient(connection, 0, partial(_end_process, Launch())).wait_for_all()
        connection._socket.shutdown(socket.SHUT_RDWR)
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    process.join(10)
    process.kill()
    assert process.exitcode == 2


def test_ranks_that_finish_just_after_another_gave_up_have_all_finished() -> None:
    ranks = Ranks(2, limit_seconds=0.5).met()
    (first,) = ranks.each(MonitorClient.finish, 0)
    time.sleep(0.7)
    (second,) = ranks.each(MonitorClient.finish, 1)
    assert first.result(10) is second.result(10) is None


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"7\n", b'["hello", "guessed", 1]\n', b"[" * 50_000 + b"\n"]
)
def test_strangers_are_sent_away(words: bytes) -> None:
    ranks = Ranks(2, absent=1)
    with socket.create_connection(("127.0.0.1", int(ranks.address.split()[0]))) as stranger:
        stranger.sendall(words)
        stranger.settimeout(10)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    ranks.lines.append(ranks.call(1))  # kept: a connection that is collected closes
    (meeting,) = ranks.each(MonitorClient.wait_for_all, 0)
    assert meeting.result(10) is None


def test_a_pause_of_ones_own_is_one_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rank that was stopped does not hold its own pause against the others."""
    mine, theirs = socket.socketpair()
    sent, now = list[str](), 0.0

    def pause(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
        nonlocal now
        assert seconds == pytest.approx(6)
        now += 1000.0 if not sent else 6.0
        return []

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    monkeypatch.setattr(watchdog, "wait", pause)
    line = Connection(mine, 60)
    monkeypatch.setattr(line, "send", sent.append)
    with theirs:
        assert list(line.messages()) == [["disconnected", "died or hangs (silent for 60 s)"]]
    assert (sent, now) == (["heartbeat"] * 12, 1000.0 + 11 * 6.0)


def test_within_gives_the_result_the_error_or_up() -> None:
    assert with_timeout(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_timeout(10, lambda: 1 // 0)
    forever = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        with_timeout(0.1, forever.wait)
    forever.set()


def test_lost_ranks_are_told_with_like_fates_together() -> None:
    error = LostRankError({0: "died", 1: "ended with ValueError: x", 3: "died"})
    assert "but ranks 0, 3 died; rank 1 ended with ValueError: x; start again" in str(error)


def test_a_rank_that_fails_as_soon_as_it_has_come_is_named_with_its_reason() -> None:
    """Its first two messages may arrive at once."""
    ranks = Ranks(2, absent=1)
    messages = ["hello", ranks.address, 1], ["failed", "ended with ValueError: no"]
    line = socket.create_connection(("127.0.0.1", int(ranks.address.split()[0])))
    line.sendall(b"".join(json.dumps(words).encode() + b"\n" for words in messages))
    (waiting,) = ranks.each(MonitorClient.wait_for_all, 0)
    if waiting.exception(10) is None:  # told before rank 1 failed
        (waiting,) = ranks.each(raising(WAITED), 0)
    assert outcome(waiting) == lost("rank 1 ended with ValueError: no")


def test_a_rank_that_only_looks_on_is_told_the_end_and_not_missed() -> None:
    address = RankMonitor(1, 60, spare_ranks=2).address
    lines = [connect("127.0.0.1", address, rank, 60, None) for rank in range(3)]
    watches = [MonitorClient(line, rank, print) for rank, line in enumerate(lines)]
    watches[0].wait_for_all()
    looking = [ThreadPoolExecutor(1).submit(each.stand_by) for each in watches[1:]]
    lines[1]._socket.shutdown(socket.SHUT_RDWR)  # it is lost
    assert "rank 0 died" in outcome(looking[0])
    time.sleep(0.5)
    assert not looking[1].done()
    watches[0].finish()
    assert looking[1].result(10) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_meet_at_an_address_of_either_kind_and_no_thread_of_gloo_preempts_another(address: str) -> None:
    port = int(free_port())
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    def meet(rank: int) -> None:
        launch = Launch(rank, 2, rank, address, port)
        with distributed_session(launch, torch.device("cpu"), 20) as group:
            total = sum(group.all_gather_objects(10 + rank))
            if sys.platform == "linux":
                threads = [int(task.name) for task in Path("/proc/self/task").iterdir() if "gloo" in _name_of(task)]
                assert threads
                assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
                assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert sys.platform != "linux" or os.sched_getscheduler(0) == os.SCHED_OTHER
        os._exit(total)

    ranks = [multiprocessing.get_context("fork").Process(target=meet, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    assert codes(ranks) == [21, 21]


def _name_of(task: Path) -> str:
    return (task / "comm").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_nobody_knows_is_told_in_a_sentence(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    launch = Launch(rank, 2, 0, "nowhere.invalid", 29511)
    told = rf"at nowhere.invalid:29511 within 0.2 s, but rank {rank} could not .* \(\[Errno -\d\] .*\)"
    with pytest.raises(UserError, match=told), distributed_session(launch, torch.device("cpu"), 0.2):
        pass
    assert capfd.readouterr() == ("", "")
