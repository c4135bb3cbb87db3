"""Nodes that die, are cut off, come back: the run goes on with those that are there, and follows the same curve."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megahead.distributed import launch as print_once
from megahead.distributed import watchdog
from megahead.train import run as elastic
from megahead.train.run import pretrain
from soak.hosts import may_make_hosts
from support.cluster import STEPS, cluster
from support.forked import forked
from support.killable import codes, start_ranks
from support.long import long
from support.node_memories import memory_of
from support.small_run import small_config, write_text
from support.together import Scenario, failures_of

FEWER, MORE = (
    "continued on 1 data rank instead of 2 data ranks",
    "continued on 2 data ranks instead of 1 data rank",
)

COPIES = {"training.checkpoint_every": 8, "training.replicate_every": 2}


@pytest.mark.slow
@pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and /dev/net/tun")
@pytest.mark.parametrize("group", ["lost and regained", long("everything else")])
def test_a_run_goes_on_whatever_happens_to_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Each scenario is a cluster of its own; they wait for agents most of the time, hence beside each other."""
    for name, module, seconds in IMPATIENCE:
        monkeypatch.setattr(module, name, seconds)
    train_undisturbed(tmp_path)
    scenarios = {
        name: scenario for name, scenario in SCENARIOS.items() if (name in FIRST) == (group != "everything else")
    }
    failed = failures_of(scenarios, tmp_path, at_once=4, seconds=200)
    assert not failed, "\n\n".join(f"{name}:\n{said}" for name, said in failed.items())


IMPATIENCE = [
    ("GRACE_SECONDS", watchdog, 0.5),
    ("_SETTLE_SECONDS", watchdog, 0.2),
    ("REPORT_SECONDS", print_once, 0.5),
]
"""Of all ranks, which are forked from here."""


def train_undisturbed(folder: Path) -> None:
    """The same run on one process, and on two ranks."""
    write_text(folder)
    forked(pretrain, small_config(folder, STEPS | {"output_dir": str(folder / "by-1")}))
    by_two = small_config(folder, STEPS | {"output_dir": str(folder / "by-2")})
    assert codes(start_ranks(by_two, 2, folder)) == [0, 0]


def undisturbed(folder: Path) -> tuple[Path, Path]:
    return folder.parent / "by-1", folder.parent / "by-2"


def left_in_memory(folder: Path) -> list[str]:
    return [path.name for number in (0, 1) for path in memory_of(folder, number).iterdir()]


def a_node_is_killed_and_one_comes_back(folder: Path) -> None:
    """There is no checkpoint yet, but a copy of step 2 in memory."""
    with cluster(folder, 2, pauses=(3, 5, 7), changes=COPIES) as run:
        run.start(0, 1)
        run.paused(3)
        run.copied(2)
        run.kill(1)
        run.go_on(3)
        run.paused(5)
        assert "all ranks must take part in the run, but rank 1 died" in run.nodes[0].said()
        assert "in memory   step 2, 2 steps more than on disk: saved as step-00000002-" in run.nodes[0].said()
        run.start(1)
        run.until(lambda: run.data_ranks() == 2)
        run.go_on(7)
        run.finished()
    assert run.meshes()[0] == FEWER
    assert MORE in run.meshes()
    assert left_in_memory(folder) == []
    assert run.equals(*undisturbed(folder))


def a_node_that_is_told_to_leave_costs_no_step(folder: Path) -> None:
    with cluster(folder, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        run.tell_to_leave(1)
        run.go_on(3)
        run.finished()
    assert run.meshes() == [FEWER]
    assert "resumed     step 3" in run.nodes[0].said(), run.said()
    assert run.equals(*undisturbed(folder))


def ranks_that_the_batch_cannot_use_wait_and_take_the_place_of_a_lost_one(folder: Path) -> None:
    """Four micro-batches a step can be split over two ranks of three. On a busy machine one may come late."""
    with cluster(folder, 3, pauses=(3, 5)) as run:
        run.start(0, 1, 2, rendezvous={"last_call_timeout": 5})
        run.until(lambda: "rank 2 waits" in run.said())
        run.paused(3)
        run.kill(1)
        run.go_on(3)
        run.paused(5)
        run.until(lambda: run.data_ranks() == 2)
        run.go_on(5)
        run.finished()
    assert "continued on 2 data ranks instead of 2 data ranks (1 spare)" in run.meshes()
    assert run.equals(*undisturbed(folder))


def a_network_is_cut_and_healed(folder: Path) -> None:
    """What the lost node still has in its memory is of a session that is over."""
    elastic.LOST_HOST_SECONDS = 3.0
    with cluster(folder, 2, pauses=(3, 5, 7), changes=COPIES) as run:
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
    assert left_in_memory(folder) == []
    assert run.equals(*undisturbed(folder))


def a_clock_that_jumps_ends_no_run(hours: int, folder: Path) -> None:
    """torchrun's agents tell by their clocks who is there. Measured: nobody is given up, and nothing begins again."""
    with cluster(folder, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        (folder / "ahead-1").write_text(str(hours))
        time.sleep(8)  # agents look after each other once a second, and give one up after six
        run.go_on(3)
        run.finished()
    assert (folder / "ahead-1.read").exists()
    assert run.equals(*undisturbed(folder))


def without_the_host_where_they_meet_the_others_end_and_the_next_start_goes_on(folder: Path) -> None:
    with cluster(folder, 2, pauses=(3,)) as run:
        run.start(0, 1)
        run.paused(3)
        run.kill(0)
        run.go_on(3)
        assert run.ended(1) == [1], run.said()
        run.start(0, 1)
        run.finished()
    assert run.equals(*undisturbed(folder))


def a_late_and_lossy_network_changes_nothing(folder: Path) -> None:
    """100 ms there and back, one frame in a hundred lost."""
    short = {"training.steps": 2, "training.evaluate_every": 2}
    with cluster(folder, 2, changes=short) as run:
        run.wire.delay, run.wire.loss = 0.05, 0.01
        run.start(0, 1)
        run.finished()
    for ranks in (1, 2):
        config = small_config(folder, STEPS | short | {"output_dir": str(folder / f"by-{ranks}")})
        assert codes(start_ranks(config, ranks, folder)) == [0] * ranks
    assert run.equals(folder / "by-1", folder / "by-2")


def a_full_disk_ends_attempts_until_there_is_room(folder: Path) -> None:
    (folder / "run").mkdir()
    with full_disk(folder / "run") as ballast, cluster(folder, 2) as run:
        run.start(0, 1)
        run.until(lambda: "bytes are missing" in run.said())
        ballast.unlink()
        run.finished()
        assert run.equals(*undisturbed(folder))


def a_node_whose_memory_is_full_costs_the_copies_alone(folder: Path) -> None:
    memory_of(folder, 1).mkdir()
    with full_disk(memory_of(folder, 1)), cluster(folder, 2, changes=COPIES) as run:
        run.start(0, 1)
        run.finished()
        assert "no more copies in memory: " in run.nodes[0].said()
    assert run.equals(*undisturbed(folder))


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A small file system in `folder`, and the file that fills it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(4 * 2**20 - 3 * 2**16))
        yield ballast
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        a_node_is_killed_and_one_comes_back,
        a_node_that_is_told_to_leave_costs_no_step,
        ranks_that_the_batch_cannot_use_wait_and_take_the_place_of_a_lost_one,
        a_network_is_cut_and_healed,
        without_the_host_where_they_meet_the_others_end_and_the_next_start_goes_on,
        a_late_and_lossy_network_changes_nothing,
        a_full_disk_ends_attempts_until_there_is_room,
        a_node_whose_memory_is_full_costs_the_copies_alone,
    )
} | {
    f"a_clock_that_jumps_by_{hours}_hours_ends_no_run": partial(a_clock_that_jumps_ends_no_run, hours)
    for hours in (1, -1)
}
FIRST = {
    scenario.__name__
    for scenario in (
        a_node_is_killed_and_one_comes_back,
        a_node_that_is_told_to_leave_costs_no_step,
    )
}
