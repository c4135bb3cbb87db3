"""Nodes that die, are cut off, come back: the run goes on with those that are there, and follows the same curve."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megahead.checkpoint import open_checkpoint
from megahead.distributed import print_once, switchboard, watch
from megahead.report.events import events_of
from megahead.report.runs import read_runs
from megahead.train import elastic, pretrain
from megahead.train.meters import Meters
from megahead.train.preemption import StopRequest
from support.agents import Node
from support.commands import config_file
from support.forked import forked
from support.hosts import Host, Wire, hosts, may_make_hosts
from support.killable import codes, start_ranks
from support.node_memories import give_memory, memory_of
from support.small_run import same_tensors, small_config, write_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and /dev/net/tun"),
]

PORT = 29500
FEWER, MORE = (
    "went on with 1 data rank instead of 2 data ranks",
    "went on with 2 data ranks instead of 1 data rank",
)
STEPS = {
    "training.steps": 8,
    "training.checkpoint_every": 2,
    "training.evaluate_every": 8,
    "optimizer.eps": 1e-4,  # else a weight without a gradient follows rounding
}


COPIES = {"training.checkpoint_every": 8, "training.copy_every": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder)
    forked(pretrain, small_config(folder, STEPS))
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder)
    assert codes(start_ranks(small_config(folder, STEPS), 2, folder)) == [0, 0]
    return folder / "run"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forks too."""
    monkeypatch.setattr(switchboard, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(switchboard, "_MORE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(print_once, "PATIENCE_SECONDS", 0.5)


class Cluster:
    """Nodes, their agents, and the run that they train."""

    def __init__(self, there: list[Host], wire: Wire, folder: Path, config: str, pauses: tuple[int, ...]) -> None:
        self.hosts, self.wire, self.folder, self.config, self._pauses = there, wire, folder, config, pauses
        self.nodes: dict[int, Node] = {}
        self.agents: dict[int, BaseProcess] = {}

    def start(self, *numbers: int, options: tuple[str, ...] = (), **more: Any) -> None:
        for number in numbers:
            command = ["--config", self.config, "--set", "parallel.elastic=true", *options]
            meeting = f"{self.hosts[0].address}:{PORT}"
            node = Node(
                self.hosts[number], number, self.folder, meeting, command, self._pausing, len(self.hosts), **more
            )
            self.nodes[number], self.agents[number] = node, node.start()

    def kill(self, number: int) -> None:
        """With all that was in its memory."""
        self.hosts[number].kill()
        self.agents[number].join()
        shutil.rmtree(memory_of(self.folder, number))

    def copied(self, step: int) -> None:
        """Waits until a copy of that step is in the memory of all nodes."""
        self.until(
            lambda: all(
                any(memory_of(self.folder, number).glob(f"megahead-run-*/*/rank-*/step-{step:08d}"))
                for number in range(len(self.hosts))
            )
        )

    def paused(self, step: int) -> None:
        """Waits until the run stands still behind that step."""
        self.until(lambda: (self.folder / f"paused-{step}").exists())

    def until(self, happened: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def go_on(self, step: int) -> None:
        (self.folder / f"go-on-{step}").touch()

    def finished(self) -> None:
        """Waits until it is, whatever becomes of a node that met the others too late."""
        self.until(lambda: (self.folder / "run/ending.json").exists() and '"finished"' in self.ending())
        self.ended(*self.agents)

    def ending(self) -> str:
        return (self.folder / "run/ending.json").read_text()

    def data_ranks(self) -> int:
        """Of the last session."""
        return int(self._sessions()[-1]["mesh"]["data"])

    def ended(self, *numbers: int, seconds: float = 40) -> list[int | None]:
        """The agents' exit codes."""
        deadline = time.monotonic() + seconds
        for number in numbers:
            self.agents[number].join(max(0.0, deadline - time.monotonic()))
        return [self.agents[number].exitcode for number in numbers]

    def said(self) -> str:
        return "\n".join(f"node {number}:\n{node.said()}" for number, node in self.nodes.items())

    def meshes(self) -> list[str]:
        """The report's events about them, from when all had met."""
        texts = [event.text for event in events_of(read_runs([self.folder / "run"])[0])]
        meshes = [session["mesh"] for session in self._sessions()]
        first = [mesh["data"] * mesh["tensor"] + mesh["waiting"] for mesh in meshes].index(len(self.hosts))
        before = sum("mesh_before" in session for session in self._sessions()[: first + 1])
        return [text for text in texts if text.startswith("went on with")][before:]

    def equals(self, by_one: Path, by_two: Path) -> bool:
        """Whether its weights are those of an undisturbed run: its bits, if two data ranks had all steps."""
        if all(session["mesh"]["data"] == 2 for session in self._sessions()):
            return same_tensors(self.folder / "run", by_two)
        return largest_difference(self.folder / "run", by_one) < 1e-5

    def _sessions(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record["session"] for record in records if "session" in record]

    def _pausing(self, number: int) -> None:
        """In an agent, and so in its ranks: behind such a step they wait, until they may go on or are asked to stop."""
        give_memory(self.folder, number)
        keep_time_by(self.folder / f"ahead-{number}")
        note, ask = Meters.step, StopRequest._note
        asked: list[int] = []

        def noted(meters: Meters, report: Any, state: Any, **kwargs: Any) -> None:
            note(meters, report, state, **kwargs)
            if os.environ["WORLD_SIZE"] == str(len(self.hosts)):
                (self.folder / "all-met").touch()
            while not (self.folder / "all-met").exists() and not asked:  # on a busy machine one came late
                time.sleep(0.02)
            if state.step in self._pauses:
                (self.folder / f"paused-{state.step}").touch()
                while not (self.folder / f"go-on-{state.step}").exists() and not asked:
                    time.sleep(0.02)

        def remembered(request: StopRequest, number: int, frame: Any) -> None:
            asked.append(number)
            ask(request, number, frame)

        Meters.step = noted  # type: ignore[method-assign]
        StopRequest._note = remembered  # type: ignore[method-assign]


@contextmanager
def cluster(
    folder: Path, count: int, pauses: tuple[int, ...] = (), changes: Mapping[str, Any] | None = None
) -> Iterator[Cluster]:
    with hosts(count) as (there, wire):
        yield Cluster(there, wire, folder, config_file(folder, {**STEPS, **(changes or {})}), pauses)


def keep_time_by(ahead: Path) -> None:
    """Of the clock that agents meet by, which runs ahead by the hours in that file, once it is there. That it was read
    then, a file beside it says."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            if not ahead.exists():
                return datetime.now(tz)
            ahead.with_suffix(".read").touch()
            return datetime.now(tz) + timedelta(hours=float(ahead.read_text()))

    dynamic_rendezvous.datetime = Clock  # type: ignore[attr-defined]


def left_in_memory(folder: Path) -> list[str]:
    return [path.name for number in (0, 1) for path in memory_of(folder, number).iterdir()]


def largest_difference(mine: Path, theirs: Path) -> float:
    """Between the weights of two runs' newest checkpoints."""
    ours, others = open_checkpoint(mine), open_checkpoint(theirs)
    names = [name for name in ours.names() if name.startswith("weight/")]
    assert names
    assert ours.step == others.step
    return max(float((ours.read(name) - others.read(name)).abs().max()) for name in names)


def test_a_node_is_killed_and_one_comes_back(tmp_path: Path, undisturbed: Path) -> None:
    """There is no checkpoint yet, but a copy of step 2 in memory."""
    with cluster(tmp_path, 2, pauses=(3, 5, 7), changes=COPIES) as run:
        run.start(0, 1)
        run.paused(3)
        run.copied(2)
        run.kill(1)
        run.go_on(3)
        run.paused(5)
        assert "all ranks must take part in the run, but rank 1 died" in run.nodes[0].said()
        assert "in memory   step 2, 2 steps newer than the disk's: saved as step-00000002" in run.nodes[0].said()
        run.start(1)
        run.until(lambda: run.data_ranks() == 2)
        run.go_on(7)
        run.finished()
    assert run.meshes()[0] == FEWER
    assert MORE in run.meshes()
    assert left_in_memory(tmp_path) == []
    assert largest_difference(tmp_path / "run", undisturbed) < 1e-5


def test_a_node_that_is_told_to_leave_costs_no_step(tmp_path: Path, undisturbed: Path) -> None:
    with cluster(tmp_path, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        os.kill(run.agents[1].pid or 0, signal.SIGTERM)
        run.until(lambda: "SIGTERM" in run.nodes[1].said())
        run.go_on(3)
        run.finished()
    assert run.meshes() == [FEWER]
    assert "resumed     step 3" in run.nodes[0].said()
    assert largest_difference(tmp_path / "run", undisturbed) < 1e-5


def test_ranks_that_the_batch_cannot_use_wait_and_take_the_place_of_a_lost_one(
    tmp_path: Path, undisturbed: Path, undisturbed_by_two: Path
) -> None:
    """Four micro-batches a step can be split over two ranks of three. On a busy machine one may come late."""
    with cluster(tmp_path, 3, pauses=(3, 5)) as run:
        run.start(0, 1, 2, rendezvous={"last_call_timeout": 15})
        run.until(lambda: "rank 2 waits" in run.said())
        run.paused(3)
        run.kill(1)
        run.go_on(3)
        run.paused(5)
        run.until(lambda: run.data_ranks() == 2)
        run.go_on(5)
        run.finished()
    assert "went on with 2 data ranks instead of 2 data ranks (1 waiting)" in run.meshes()
    assert run.equals(undisturbed, undisturbed_by_two)


def test_a_network_is_cut_and_healed(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "LOST_HOST_SECONDS", 3.0)
    """What the lost node still has in its memory is of a session that is over."""
    with cluster(tmp_path, 2, pauses=(3, 5, 7), changes=COPIES) as run:
        run.start(0, 1)
        run.paused(3)
        run.copied(2)
        run.wire.cut.add(1)
        run.go_on(3)
        run.paused(5)
        assert "rank 1 died" in run.nodes[0].said()
        run.wire.cut.clear()
        run.until(lambda: run.data_ranks() == 2 or not run.agents[1].is_alive())
        if run.data_ranks() == 1:  # its agent has given up: on a cluster something starts it again
            run.start(1)
        run.until(lambda: run.data_ranks() == 2)
        run.go_on(7)
        run.finished()
    assert run.meshes()[0] == FEWER
    assert MORE in run.meshes()
    assert left_in_memory(tmp_path) == []
    assert largest_difference(tmp_path / "run", undisturbed) < 1e-5


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_jumps_ends_no_run(
    tmp_path: Path, undisturbed: Path, undisturbed_by_two: Path, hours: int
) -> None:
    """torchrun's agents tell by their clocks who is there. Measured: nobody is given up, and nothing begins again."""
    with cluster(tmp_path, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        (tmp_path / "ahead-1").write_text(str(hours))
        time.sleep(8)  # agents look after each other once a second, and give one up after six
        run.go_on(3)
        run.finished()
    assert (tmp_path / "ahead-1.read").exists()
    assert run.equals(undisturbed, undisturbed_by_two)


def test_without_the_host_where_they_meet_the_others_end_and_the_next_start_goes_on(
    tmp_path: Path, undisturbed: Path, undisturbed_by_two: Path
) -> None:
    with cluster(tmp_path, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        run.kill(0)
        run.go_on(3)
        assert run.ended(1) == [1], run.said()
        run.start(0, 1)
        run.finished()
    assert run.equals(undisturbed, undisturbed_by_two)


def test_a_late_and_lossy_network_changes_nothing(tmp_path: Path) -> None:
    """100 ms there and back, one frame in a hundred lost."""
    short = {"training.steps": 2, "training.evaluate_every": 2}
    with cluster(tmp_path, 2, changes=short) as run:
        run.wire.delay, run.wire.loss = 0.05, 0.01
        run.start(0, 1)
        run.finished()
    for ranks in (1, 2):
        undisturbed = small_config(tmp_path, STEPS | short | {"output_dir": str(tmp_path / f"by-{ranks}")})
        assert codes(start_ranks(undisturbed, ranks, tmp_path)) == [0] * ranks
    assert run.equals(tmp_path / "by-1", tmp_path / "by-2")


def test_a_full_disk_ends_attempts_until_there_is_room(
    tmp_path: Path, undisturbed: Path, undisturbed_by_two: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with full_disk(folder) as ballast, cluster(tmp_path, 2) as run:
        run.start(0, 1)
        run.until(lambda: "bytes are missing" in run.said())
        ballast.unlink()
        run.finished()
        assert run.equals(undisturbed, undisturbed_by_two)


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A small file system in `folder`, and the file that fills it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(4 * 2**20 - 3 * 2**16))
        yield ballast
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
