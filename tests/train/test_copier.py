"""Copies in memory in whole runs: what they save after a kill, what ends them, and that nothing is left of them."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.format import Snapshot
from megahead.checkpoints.memory import share_replicas
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.engine.engine import Engine
from megahead.errors import UserError
from megahead.files import WriteError
from megahead.report.read import events_of, read_metrics, read_runs
from megahead.train import loop
from megahead.train import run as setup
from megahead.train import saving as copier
from megahead.train import session as sessions
from megahead.train.loop import Training
from megahead.train.progress import Progress
from megahead.train.run import pretrain
from support.bad_rows import run_with
from support.killable import Sabotage, codes, said, start_ranks
from support.long import long_but
from support.named import without_digits
from support.node_memories import files_in, give_memory, leave_room, memory_of
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

COPIES = {"training.replicate_every": 2, "training.checkpoint_every": 3}


def waiting_for_copies() -> None:
    """On a busy machine as on a quiet one, each is complete when training goes on."""
    replicate = copier.Checkpointer.replicate

    def patiently(mine: copier.Checkpointer) -> copier.Event:
        event = replicate(mine)
        if mine._replicas is not None and mine._replicas._pending is not None:
            mine._replicas._pending.exception(60)
        return event

    copier.Checkpointer.replicate = patiently  # type: ignore[method-assign]


def on_node(folder: Path, dies_at: int | None = None, survivors: int = 0) -> Sabotage:
    """Each rank is a node. With `dies_at` all but the first `survivors` are killed at once behind that step, before
    anything is kept of it."""

    def sabotage(rank: int) -> None:
        give_memory(folder, rank)
        sessions.share_replicas = lambda run, launch: share_replicas(run, replace(launch, local_rank=0))
        waiting_for_copies()
        keep = loop._evaluate_and_save_if_due

        def die(run: Training) -> None:
            if run.state.step == dies_at:
                run.progress.world_group.all_gather_objects(None)
                if rank >= survivors:
                    time.sleep(0.1 * rank)
                    os.kill(os.getpid(), signal.SIGKILL)
            keep(run)

        loop._evaluate_and_save_if_due = die

    return sabotage


MESHES: dict[str, dict[str, Any]] = {
    "zero 0, saved in the background": stage(0) | {"training.save_in_background": True},
    "zero 1, embedding in rows": stage(1) | {"engine.embedding": "rows"},
    "zero 2, two tensor ranks": stage(2) | {"parallel.tensor": 2},
    "zero 3": stage(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", long_but(["zero 1, embedding in rows"], MESHES))
def test_without_one_node_a_run_goes_on_from_the_step_of_its_last_copy(tmp_path: Path, mesh: str) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, COPIES | MESHES[mesh])
    assert -signal.SIGKILL in codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path, dies_at=5)))
    shutil.rmtree(memory_of(tmp_path, 1))
    assert codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path))) == [0, 0], said(tmp_path, 0)
    assert "in memory   step 4, 1 step more than on disk: saved as step-00000004 in" in without_digits(
        said(tmp_path, 0)
    )
    assert "resumed     step 4" in said(tmp_path, 0)
    assert "the checkpoint came from memory, 1 step more than on disk" in events(tmp_path / "run")
    undisturbed = small_config(tmp_path, MESHES[mesh] | {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")
    assert [record["step"] for record in read_metrics(tmp_path / "run").training] == [1, 2, 3, 4, 5, 6]
    assert all(not list(memory_of(tmp_path, rank).iterdir()) for rank in (0, 1))


@pytest.mark.slow
def test_a_process_that_dies_before_the_first_checkpoint_loses_little_and_more_ranks_may_go_on(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 2, "training.checkpoint_every": 100})
    assert codes(start_ranks(config, 1, tmp_path, sabotage=on_node(tmp_path, dies_at=5))) == [-signal.SIGKILL]
    elsewhere = small_config(tmp_path, {"training.replicate_every": 2, "output_dir": str(tmp_path / "elsewhere")})
    assert codes(start_ranks(elsewhere, 1, tmp_path, sabotage=on_node(tmp_path))) == [0]
    assert "resumed" not in said(tmp_path, 0)
    assert codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path))) == [0, 0], said(tmp_path, 0)
    assert "in memory   step 4, 4 steps more than on disk: saved as step-00000004 in" in without_digits(
        said(tmp_path, 0)
    )


@pytest.mark.slow
def test_a_rank_that_loses_another_leaves_its_copies(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 2, "training.checkpoint_every": 100})
    died = on_node(tmp_path, dies_at=5, survivors=1)
    assert codes(start_ranks(config, 2, tmp_path, sabotage=died)) == [2, -signal.SIGKILL]
    shutil.rmtree(memory_of(tmp_path, 1))
    assert codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path))) == [0, 0], said(tmp_path, 0)
    assert "in memory   step 4, 4 steps more than on disk" in said(tmp_path, 0)


@pytest.mark.parametrize("resume", ["never", "a folder"])
def test_a_start_that_is_not_automatic_leaves_copies_unread(tmp_path: Path, resume: str) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, COPIES | {"training.checkpoint_every": 100 if resume == "never" else 3})
    assert codes(start_ranks(config, 1, tmp_path, sabotage=on_node(tmp_path, dies_at=5))) == [-signal.SIGKILL]
    assert any("step-00000004" in name for name in files_in(memory_of(tmp_path, 0)))
    saved = [str(path) for path in (tmp_path / "run/checkpoints").glob("step-*")]
    assert codes(start_ranks(config, 1, tmp_path, *saved or ["never"], sabotage=on_node(tmp_path))) == [0]
    assert "in memory" not in said(tmp_path, 0)
    assert ("resumed     step 3" in said(tmp_path, 0)) == bool(saved)


@pytest.mark.slow
def test_a_later_phase_keeps_copies_too(tmp_path: Path) -> None:
    write_text(tmp_path)
    phases = {"objective.schedule": {"vanilla_share": 0.5}, "training.checkpoint_every": 100, "training.steps": 8}
    config = small_config(tmp_path, phases | {"training.replicate_every": 2})
    assert -signal.SIGKILL in codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path, dies_at=7)))
    assert codes(start_ranks(config, 2, tmp_path, sabotage=on_node(tmp_path))) == [0, 0], said(tmp_path, 0)
    assert "in memory   step 6, 2 steps more than on disk: saved as step-00000006 in" in without_digits(
        said(tmp_path, 0)
    )
    assert all(not list(memory_of(tmp_path, rank).iterdir()) for rank in (0, 1))


@pytest.mark.slow
def test_ranks_that_wait_hand_over_what_is_on_their_nodes(tmp_path: Path) -> None:
    """Of four nodes the last is lost; two of the others train, which lack the third's file."""
    write_text(tmp_path)
    config = small_config(tmp_path, COPIES | {"parallel.elastic": True, "training.checkpoint_every": 100})
    assert -signal.SIGKILL in codes(start_ranks(config, 4, tmp_path, sabotage=on_node(tmp_path, dies_at=5)))
    shutil.rmtree(memory_of(tmp_path, 3))
    assert codes(start_ranks(config, 3, tmp_path, sabotage=on_node(tmp_path))) == [0, 0, 0], said(tmp_path, 0)
    assert "rank 2 waits" in said(tmp_path, 2)
    assert "in memory   step 4, 4 steps more than on disk: saved as step-00000004 in" in without_digits(
        said(tmp_path, 0)
    )
    assert not (tmp_path / "run/handed-over").exists()
    assert all(not list(memory_of(tmp_path, node).iterdir()) for node in (0, 1, 2))


def events(run: Path) -> list[str]:
    return [event.text for event in events_of(read_runs([run])[0])]


def told(group: Group, config: RunConfig, launch: Launch | None = None) -> str:
    """What a run says until its end."""
    sys.stdout = StringIO()
    try:
        pretrain(config, launch or Launch())
    except UserError as error:
        print(f"error: {error}")
    return sys.stdout.getvalue()


def told_without_room(group: Group, config: RunConfig, folder: Path) -> str:
    give_memory(folder, group.rank)
    waiting_for_copies()
    leave_room(1000)
    return told(group, config)


def test_without_room_a_run_goes_on_without_copies_and_says_so_once(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 1, "training.checkpoint_every": 100})
    first, _ = on_ranks(2, told_without_room, config, tmp_path)
    assert first.count("no more copies in memory") == 1
    assert "step 2: no more copies in memory: " in first
    assert "must have room for" in first
    assert "finished at step 6" in first
    assert sum("kept no more copies in memory" in text for text in events(tmp_path / "run")) == 1
    assert files_in(memory_of(tmp_path, 0)) == []


def told_with_slow_copies(group: Group, config: RunConfig, folder: Path) -> str:
    give_memory(folder, group.rank)
    write = Snapshot.write

    def slowly(snapshot: Snapshot, place: Path) -> Any:
        if "megahead-run" in str(place) and group.rank == 1:
            time.sleep(4)
        return write(snapshot, place)

    Snapshot.write = slowly  # type: ignore[method-assign]
    return told(group, config)


def test_a_slow_node_delays_copies_but_no_step(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 1, "training.checkpoint_every": 100})
    first, _ = on_ranks(2, told_with_slow_copies, config, tmp_path)
    assert first.count("the copy in memory is not renewed") == 1
    records = [event["copy"] for event in read_metrics(tmp_path / "run").events if "copy" in event]
    assert records[0]["bytes"] > 0
    assert records[0]["stall_seconds"] < 2
    assert [record.get("skipped") for record in records] == [None, 1, 2, 3, 4, 5]
    assert sum("a copy in memory was skipped" in text for text in events(tmp_path / "run")) == 1


def roll_back_with_copies(group: Group, config: RunConfig, folder: Path) -> tuple[list[str], list[str], str]:
    """What is in memory right before the run goes back."""
    memory = give_memory(folder, group.rank)
    waiting_for_copies()
    go_back, forget = Progress.roll_back, copier.Checkpointer.before_rollback
    before: list[str] = []
    then: list[str] = []

    def forgetting(mine: copier.Checkpointer) -> None:
        before.extend(files_in(memory))
        forget(mine)

    def noting(progress: Progress) -> Path | None:
        then.extend(files_in(memory))
        return go_back(progress)

    copier.Checkpointer.before_rollback = forgetting  # type: ignore[method-assign]
    Progress.roll_back = noting  # type: ignore[method-assign]
    return before, then, run_with(group, config, math.nan)


def test_a_rollback_forgets_copies_of_what_it_takes_back(tmp_path: Path) -> None:
    write_text(tmp_path)
    policy = {"faults.bad_step": "rollback", "training.replicate_every": 1, "training.checkpoint_every": 2}
    for before, then, ending in on_ranks(2, roll_back_with_copies, small_config(tmp_path, policy), tmp_path):
        assert before
        assert then == []
        assert ending == "finished"


def steps_with_compared_replicas(group: Group, config: RunConfig, folder: Path) -> list[int]:
    give_memory(folder, group.rank)
    waiting_for_copies()
    compared: list[int] = []
    replicated = Engine.replicated_weights

    def noted(engine: Engine) -> Any:
        compared.append(engine.optimizer_steps)
        return replicated(engine)

    Engine.replicated_weights = noted  # type: ignore[method-assign]
    pretrain(config, Launch())
    return compared


def test_replicas_are_compared_before_a_copy_as_before_a_checkpoint(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 2, "training.checkpoint_every": 3})
    assert on_ranks(2, steps_with_compared_replicas, config, tmp_path) == [[2, 3, 4, 6]] * 2


def end_with_an_error(group: Group, config: RunConfig, folder: Path, restarts: bool) -> list[str]:
    memory = give_memory(folder, group.rank)
    waiting_for_copies()

    def fail(*_: Any) -> None:
        raise UserError("a reason to end.")

    setup.FaultPolicy.record_loss = lambda fault_policy, loss, losses: (
        fail() if len(losses) > 2 else losses.append(loss)
    )  # type: ignore[method-assign, misc]
    assert "error: a reason to end." in told(group, config, Launch(restarts_ranks=restarts))
    return files_in(memory)


def end_on_a_full_disk(group: Group, config: RunConfig, folder: Path) -> list[str]:
    """The last file of the run finds no room."""
    memory, write = give_memory(folder, group.rank), sessions.write_atomically

    def fail(path: Path, *parts: str | bytes) -> None:
        if path.name == "ending.json":
            raise WriteError(path, OSError(errno.ENOSPC, "No space left on device"))
        write(path, *parts)

    waiting_for_copies()
    sessions.write_atomically = fail
    assert ("No space left" in told(group, config, Launch())) == (group.rank == 0)
    return files_in(memory)


def test_an_error_at_the_end_leaves_no_copies(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 1, "training.checkpoint_every": 100})
    assert on_ranks(2, end_on_a_full_disk, config, tmp_path) == [[], []]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_error_leaves_copies_only_where_ranks_are_started_again(tmp_path: Path, restarts: bool) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.replicate_every": 1, "training.checkpoint_every": 100})
    for files in on_ranks(2, end_with_an_error, config, tmp_path, restarts):
        assert bool(files) == restarts
