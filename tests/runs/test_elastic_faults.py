"""Nodes that die, are cut off, come back: the run goes on with those that are there, and follows the same curve."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megahead.distributed import print_once, switchboard, watch
from megahead.train import elastic, pretrain
from support.cluster import STEPS, cluster, largest_difference
from support.forked import forked
from support.hosts import may_make_hosts
from support.killable import codes, start_ranks
from support.node_memories import memory_of
from support.small_run import small_config, write_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and /dev/net/tun"),
]

FEWER, MORE = (
    "went on with 1 data rank instead of 2 data ranks",
    "went on with 2 data ranks instead of 1 data rank",
)

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


def left_in_memory(folder: Path) -> list[str]:
    return [path.name for number in (0, 1) for path in memory_of(folder, number).iterdir()]


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
    """What the lost node still has in its memory is of a session that is over."""
    monkeypatch.setattr(elastic, "LOST_HOST_SECONDS", 3.0)
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
