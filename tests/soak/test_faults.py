"""The soak's script is decided by its seed alone, and its faults do what they say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from soak.course import Settings
from soak.faults import KINDS, SECOND_WITHIN, Fault, Script, damage
from soak.hosts import hosts, may_make_hosts
from soak.nodes import Machine, mounted, node_script
from soak.rank import disturb
from support.killable import codes, said, start_ranks
from support.small_run import small_config, write_text


def script(seed: int = 0, kinds: list[str] | None = None) -> Script:
    return Settings(seed, 3, 60.0, "any", 0.0, kinds or sorted(KINDS)).script()


def test_an_event_is_the_same_whenever_it_is_asked_for() -> None:
    events = [script().event(number) for number in range(40)]
    assert script().event(33) == events[33]
    assert events != [script(seed=1).event(number) for number in range(40)]


def test_each_kind_comes_first_once_a_round() -> None:
    for start in (0, len(KINDS), 5 * len(KINDS)):
        first = [script().event(start + place).faults[0].kind for place in range(len(KINDS))]
        assert sorted(first) == sorted(KINDS)


def test_events_come_as_often_as_told_and_some_have_two_faults() -> None:
    events = [script().event(number) for number in range(600)]
    assert 55 < statistics.fmean(event.pause for event in events) < 65
    assert 0.1 < statistics.fmean(len(event.faults) == 2 for event in events) < 0.3
    for fault in (fault for event in events for fault in event.faults):
        least, most = KINDS[fault.kind].lasts
        assert least <= fault.lasts <= most
        assert 0 <= fault.after <= SECOND_WITHIN
        assert fault.node in range(3)


def test_a_flipped_bit_comes_alone() -> None:
    """Another fault could undo it before replicas are compared."""
    events = [script(kinds=["bit flipped in a weight", "rank killed"]).event(number) for number in range(200)]
    flips = [event for event in events if any(fault.kind == "bit flipped in a weight" for fault in event.faults)]
    assert len(flips) == 100
    assert all(len(event.faults) == 1 for event in flips)


class Box(Machine):
    """A machine that keeps something in its memory."""

    def begin(self) -> None:
        self.start(
            "mount -t tmpfs none /dev/shm && ls /dev/shm && touch /dev/shm/kept && hostname x && sleep 99 & wait", {}
        )


needs_hosts = pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and /dev/net/tun")


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_bit_flips_and_is_found(tmp_path: Path) -> None:
    write_text(tmp_path)
    flip = tmp_path / "flip"
    flip.write_text("12345")

    def disturbed(rank: int) -> None:
        disturb(0.0, flip if rank == 1 else tmp_path / "none", ranks=2)

    config = small_config(tmp_path, {"training.checkpoint_every": 2})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=disturbed)) == [2, 2]
    told = said(tmp_path, 0) + said(tmp_path, 1)
    assert "replicas of weights must hold the same bits, but at step 2: ranks 0, 1 (" in told
    assert not flip.exists()


def test_steps_take_as_long_as_told(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"data.validation": None})
    began = time.monotonic()
    (rank,) = start_ranks(config, 1, tmp_path, sabotage=lambda rank: disturb(0.3, tmp_path / "none", ranks=1))
    assert codes([rank]) == [0]
    assert time.monotonic() - began > 5 * 0.3


def test_a_damaged_file_is_not_what_it_was(tmp_path: Path) -> None:
    ways = set[str]()
    for chance in range(40):
        folder = tmp_path / f"step-{chance}"
        folder.mkdir()
        files = [folder / "a", folder / "b"]
        for file in files:
            file.write_bytes(bytes(100))
        told = damage(files, Fault("", 0, 0.0, 0.0, chance))
        assert told is not None
        ways.add(told.partition(":")[0])
        assert [file.read_bytes() if file.exists() else b"" for file in files] != [bytes(100)] * 2
    assert ways == {"a bit flipped", "cut short", "removed", "removed with its folder"}
    assert damage([], Fault("", 0, 0.0, 0.0, 0)) is None


def test_nodes_run_what_users_run(tmp_path: Path) -> None:
    script = node_script(tmp_path).read_text()
    assert "soak/agent.py --nnodes" in script
    assert "soak/rank.py --set parallel.elastic=true" in script


@needs_hosts
def test_a_machine_takes_its_memory_along(tmp_path: Path) -> None:
    with hosts(1) as (there, _):
        machine = Box(there[0], tmp_path / "log")
        for _ in range(2):
            machine.begin()
            until(lambda: (first := machine.first()) and Path(f"/proc/{first.pid}/root/dev/shm/kept").exists())
            processes = there[0].processes()
            assert machine.runs()
            machine.kill()
            assert not machine.runs()
            until(lambda processes=processes: not any(Path(f"/proc/{number}").exists() for number in processes))
        assert (tmp_path / "log").read_text() == ""
    assert not Path("/dev/shm/kept").exists()


@needs_hosts
def test_a_disk_is_full_until_it_is_emptied_and_keeps_what_is_on_it(tmp_path: Path) -> None:
    with mounted(tmp_path) as there:
        there.fill()
        with pytest.raises(OSError, match="No space left"):
            (there.place / "more").write_bytes(bytes(1 << 20))
        there.empty()
        (there.place / "more").write_bytes(bytes(1 << 20))
    assert not (tmp_path / "disk/more").exists()
    with mounted(tmp_path) as there:
        assert (there.place / "more").stat().st_size == 1 << 20
