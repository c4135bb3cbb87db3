"""A rank that dies, fails, hangs or is stopped at whichever moment: the others end within a stated time and name it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from megahead.distributed import launch as print_once
from megahead.distributed import watchdog
from megahead.distributed.group import Group
from megahead.distributed.watchdog import MonitorClient
from megahead.engine import engine
from megahead.engine.engine import Engine
from megahead.train import session
from megahead.train.log import RunLogger
from support.killable import Sabotage, codes, said, start_ranks
from support.long import long
from support.small_run import small_config, stage, write_text

Act = Callable[[], Any]


def at_step(step: int, victim: int, act: Act) -> Sabotage:
    """`act()` on rank `victim` once it has taken `step` steps."""

    def sabotage(rank: int) -> None:
        note = RunLogger.log_step

        def noted(logger: RunLogger, report: Any, state: Any, **kwargs: Any) -> None:
            note(logger, report, state, **kwargs)
            if rank == victim and state.step == step:
                act()

        RunLogger.log_step = noted  # type: ignore[method-assign]

    return sabotage


def before(owner: Any, name: str, victim: int, act: Act, call: int = 1) -> Sabotage:
    """`act()` on rank `victim` right before `owner.name` is called for the `call`th time."""

    def sabotage(rank: int) -> None:
        original, calls = getattr(owner, name), 0

        def acting(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == victim and calls == call:
                act()
            return original(*arguments, **named)

        setattr(owner, name, acting)

    return sabotage


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_late() -> None:
    """When the other has come."""
    time.sleep(2)
    die()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("a mistake of its own")


def survivor(folder: Path, victim: int, sabotage: Sabotage, seconds: float, changes: dict[str, Any]) -> str:
    """What the rank that is not `victim` says, which ends with code 2 within `seconds`; the victim is killed then."""
    write_text(folder)
    ranks = start_ranks(small_config(folder, changes), 2, folder, sabotage=sabotage)
    ranks[1 - victim].join(seconds)
    ranks[victim].kill()
    assert codes(ranks, 1)[1 - victim] == 2, said(folder, 1 - victim)
    return said(folder, 1 - victim)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given seconds to answer or to listen."""
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(print_once, "REPORT_SECONDS", 0.5)


PLACES = {
    "before all have met": (MonitorClient, "wait_for_all"),
    "before it connects": (dist, "init_process_group"),
    "before its first group": (Group, "new_gloo_group"),
    "before its third group": (Group, "new_gloo_group", 3),
    "before its first weight": (engine, "load_weights_"),
    "before DeepSpeed's groups": (groups, "_clone_world_group"),
    "inside of DeepSpeed's start": (DeepSpeedEngine, "_configure_optimizer"),
    "before it looks for checkpoints": (session, "find_resume_point"),
    "before the first step": (Engine, "micro_step"),
    "before it leaves": (MonitorClient, "finish"),
}


def at(place: str, victim: int, act: Act) -> Sabotage:
    owner, name, *call = PLACES[place]
    return before(owner, name, victim, act, *call)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_anywhere_is_named_by_the_other_soon(tmp_path: Path, place: str, victim: int) -> None:
    """Soon, and not after `engine.timeout_seconds`."""

    act = die_late if place == "before all have met" else die
    told = survivor(tmp_path, victim, at(place, victim, act), 60, {"engine.timeout_seconds": 600})
    assert f"rank {victim} died; start again to resume." in told
    assert "Traceback" not in told


@pytest.mark.parametrize("place", ["inside of DeepSpeed's start", "before the first step"])
def test_of_four_ranks_that_wait_for_each_other_three_name_the_fourth_once(tmp_path: Path, place: str) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.timeout_seconds": 600, "parallel.tensor": 2})
    assert codes(start_ranks(config, 4, tmp_path, sabotage=at(place, 3, die))) == [2, 2, 2, -signal.SIGKILL]
    told = "".join(said(tmp_path, rank) for rank in range(4))
    assert told.count("error: ") == told.count("but rank 3 died; start again to resume.") == 1, told


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("place", "act"),
    [
        ("before it connects", stop),
        ("before DeepSpeed's groups", stop),
        long("before DeepSpeed's groups", hang),
        ("before it leaves", stop),
        ("before it leaves", hang),
    ],
)
def test_a_rank_that_stands_still_is_named_after_the_timeout(tmp_path: Path, place: str, victim: int, act: Act) -> None:
    """Stopped as by a debugger or a frozen machine, rank 0 with the store in which all look each other up; or only its
    main thread."""
    told = survivor(tmp_path, victim, at(place, victim, act), 30, {"engine.timeout_seconds": 5})
    assert f"rank {victim} died or hangs (" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(("victim", "zero"), [(0, 0), (1, 2)])
def test_a_run_goes_on_after_a_rank_died_on_its_way(tmp_path: Path, victim: int, zero: int) -> None:
    changes = stage(zero) | {"engine.timeout_seconds": 100, "training.checkpoint_every": 1}
    told = survivor(tmp_path, victim, at_step(3, victim, die), 30, changes)
    assert f"rank {victim} died; start again to resume." in told
    assert codes(start_ranks(small_config(tmp_path, changes), 2, tmp_path)) == [0, 0]
    assert "resumed" in said(tmp_path, 0)


@pytest.mark.usefixtures("_impatient")
def test_a_rank_that_hangs_shows_where_and_ends_as_well(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.timeout_seconds": 3, "training.steps": 50})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=at_step(3, 1, hang))) == [2, 2]
    assert "rank 1 died or hangs (no answer within 0.5 s)" in said(tmp_path, 0)
    assert "in hang\n    time.sleep(600)" in said(tmp_path, 1)


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.steps": 50})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=at_step(3, 1, fail))) == [2, 1]
    assert "rank 1 ended with ValueError: a mistake of its own" in said(tmp_path, 0)


@pytest.mark.usefixtures("_impatient")
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    write_text(tmp_path)
    for victim, told in enumerate(["rank 1 could not find rank 0 there", "rank 1 did not come within 3 s"]):
        sabotage = lambda rank, victim=victim: os._exit(9) if rank == victim else None  # noqa: E731
        assert told in survivor(tmp_path, victim, sabotage, 30, {"engine.timeout_seconds": 3})


def test_ranks_that_are_slow_or_stopped_for_less_than_the_timeout_are_waited_for(tmp_path: Path) -> None:
    """A stop is longer than most beats of the lines."""

    def tarry() -> None:
        if os.fork() == 0:  # who continues it
            time.sleep(3)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        stop()

    def sabotage(rank: int) -> None:
        for victim, place in enumerate(["before DeepSpeed's groups", "before the first step"]):
            at(place, victim, tarry)(rank)
        time.sleep(2 * rank)

    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.timeout_seconds": 6})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=sabotage)) == [0, 0], said(tmp_path, 0)
