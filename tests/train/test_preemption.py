"""Signals in every phase of a run: it is saved soon, says so in a file, and goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megahead.checkpoints.format import Snapshot
from megahead.checkpoints.reading import open_checkpoint
from megahead.engine.engine import Engine
from megahead.report.read import Record, read_metrics
from megahead.run_folder import RunFolder
from megahead.train.saving import Checkpointer
from support.killable import codes, said, start_ranks
from support.long import long
from support.small_run import same_tensors, small_config, write_text


def signalled(owner: Any, name: str, at_call: int, signals: int = 1) -> Callable[[int], None]:
    """On the last rank, `signals` SIGTERMs arrive within the `at_call`th call of `owner.name`."""

    def sabotage(rank: int) -> None:
        original, calls = getattr(owner, name), 0

        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == at_call:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.01)
            return original(*args, **kwargs)

        setattr(owner, name, act)

    return sabotage


PHASES = {
    "training": signalled(Engine, "micro_step", 5),  # two a step: the third step
    "evaluation": signalled(Engine, "evaluate", 1),  # of two
    "saving, twice": signalled(Snapshot, "write", 1, signals=2),
}


@pytest.mark.parametrize(
    ("phase", "background"),
    [(phase, phase == "training") for phase in PHASES] + [long(phase, phase != "training") for phase in PHASES],
)
def test_a_signal_in_any_phase_saves_and_is_forgotten_on_resume(tmp_path: Path, phase: str, background: bool) -> None:
    write_text(tmp_path)
    every = {"training.checkpoint_every": 4, "training.evaluate_every": 3, "training.save_in_background": background}
    config = small_config(tmp_path, every)
    assert codes(start_ranks(config, 2, tmp_path, sabotage=PHASES[phase])) == [0, 0], said(tmp_path, 1)
    ending = json.loads(RunFolder(tmp_path / "run").session_end.read_text())
    stopped_at = {"training": 3, "evaluation": 3, "saving, twice": 4 + background}[phase]
    late = background and phase == "saving, twice"  # the signal comes from the thread that writes, whenever that is run
    assert ending["ending"] == "stopped" or (late and ending["step"] == 6)
    assert ending["step"] == open_checkpoint(tmp_path / "run").step
    assert stopped_at - background <= ending["step"] <= (6 if late else stopped_at)
    if phase == "evaluation":
        assert "held out" not in said(tmp_path, 0)  # who stops us has little timeout
    assert codes(start_ranks(config, 2, tmp_path)) == [0, 0], said(tmp_path, 1)
    assert json.loads(RunFolder(tmp_path / "run").session_end.read_text()) == {
        "ending": "finished",
        "step": 6,
        "steps": 6,
    }
    undisturbed = small_config(tmp_path, every | {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")
    mine, theirs = (read_metrics(tmp_path / name) for name in ("run", "undisturbed"))
    assert losses(mine.training) == losses(theirs.training)
    assert losses(mine.validation) == losses(theirs.validation)
    assert [step for step, _ in losses(mine.validation)] == [3, 6]


def broken_pipe() -> int:
    """What an output is under `| tee` once Ctrl-C has ended `tee`."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("open_output", [broken_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "disk"])
def test_ctrl_c_saves_where_nothing_can_be_printed(tmp_path: Path, open_output: Callable[[], int]) -> None:
    write_text(tmp_path)
    micro_step = Engine.micro_step

    def interrupt(rank: int) -> None:
        def act(*args: Any, **kwargs: Any) -> Any:
            Engine.micro_step = micro_step  # type: ignore[method-assign]
            for output in (1, 2):
                os.dup2(open_output(), output)
            os.kill(os.getpid(), signal.SIGINT)
            return micro_step(*args, **kwargs)

        Engine.micro_step = act  # type: ignore[method-assign]

    assert codes(start_ranks(small_config(tmp_path), 2, tmp_path, sabotage=interrupt)) == [0, 0], said(tmp_path, 0)
    ending = json.loads(RunFolder(tmp_path / "run").session_end.read_text())
    assert ending == {"ending": "stopped", "step": open_checkpoint(tmp_path / "run").step, "steps": 6}


def test_a_second_ctrl_c_ends_at_once_also_while_a_save_hangs(tmp_path: Path) -> None:
    write_text(tmp_path)

    def interrupt_twice(rank: int) -> None:
        is_saving, micro_step = Event(), Engine.micro_step

        def hang(*_: Any) -> None:
            is_saving.set()
            time.sleep(60)

        def act(*args: Any, **kwargs: Any) -> Any:
            if is_saving.is_set():
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
            return micro_step(*args, **kwargs)

        Snapshot.write, Engine.micro_step = hang, act  # type: ignore[method-assign, assignment]

    changes = {"training.save_in_background": True, "training.checkpoint_every": 1, "training.steps": 500}
    ranks = start_ranks(small_config(tmp_path, changes), 1, tmp_path, sabotage=interrupt_twice)
    assert codes(ranks, seconds=40) == [130], said(tmp_path, 0)


def losses(records: Sequence[Record]) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records]


def test_a_checkpoint_knows_the_evaluation_that_was_made_up_for(tmp_path: Path) -> None:
    """The best are chosen by it, as in the undisturbed run."""
    write_text(tmp_path)
    changes = {"training.evaluate_every": 3}
    config = small_config(tmp_path, changes)
    undisturbed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=PHASES["evaluation"])) == [0, 0], said(tmp_path, 1)
    for either in (config, undisturbed):
        assert codes(start_ranks(either, 2, tmp_path)) == [0, 0], said(tmp_path, 1)
    for step in (3, 6):
        mine, theirs = (
            open_checkpoint(tmp_path / name / f"checkpoints/step-{step:08d}").state["validation"]
            for name in ("run", "undisturbed")
        )
        assert mine == theirs
        assert mine["step"] == step


SWITCHING = {"objective.schedule": {"vanilla_share": 0.5}}


@pytest.mark.parametrize(
    ("changes", "sabotage", "stops_at"),
    [
        ({"training.evaluate_every": 3}, PHASES["evaluation"], 3),
        long({}, PHASES["evaluation"], 6),
        (SWITCHING, signalled(Engine, "evaluate", 3), 3),  # two are of the first part's head
        long({}, signalled(Checkpointer, "__init__", 1), 0),
    ],
    ids=["along training", "the last one", "at the switch", "before the first step"],
)
def test_a_session_that_is_stopped_takes_no_step_and_loses_no_evaluation(
    tmp_path: Path, changes: dict[str, Any], sabotage: Callable[[int], None], stops_at: int
) -> None:
    """Also if the evaluation that the next session makes up for is interrupted again."""
    write_text(tmp_path)
    config = small_config(tmp_path, changes)
    undisturbed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "undisturbed")})
    for again in (False, True):
        first = signalled(Engine, "evaluate", 1) if again and stops_at else sabotage
        assert codes(start_ranks(config, 2, tmp_path, sabotage=first)) == [0, 0], said(tmp_path, 1)
        ending = json.loads(RunFolder(tmp_path / "run").session_end.read_text())
        assert ending == {"ending": "stopped", "step": stops_at, "steps": 6}
    for either in (config, undisturbed):
        assert codes(start_ranks(either, 2, tmp_path)) == [0, 0], said(tmp_path, 1)
        assert json.loads(either.folder().session_end.read_text())["ending"] == "finished"
    mine, theirs = (read_metrics(tmp_path / name) for name in ("run", "undisturbed"))
    assert losses(mine.validation) == losses(theirs.validation)
    assert losses(mine.training) == losses(theirs.training)
    mine_last, theirs_last = (open_checkpoint(tmp_path / name) for name in ("run", "undisturbed"))
    assert mine_last.state["validation"] == theirs_last.state["validation"]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")


def test_a_run_that_is_killed_leaves_no_mark(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert codes(start_ranks(small_config(tmp_path), 1, tmp_path)) == [0]
    assert RunFolder(tmp_path / "run").session_end.exists()

    def die(rank: int) -> None:
        Engine.micro_step = lambda *_: os._exit(9)  # type: ignore[method-assign]

    longer = small_config(tmp_path, {"training.steps": 9})
    assert codes(start_ranks(longer, 1, tmp_path, sabotage=die)) == [9]
    assert not RunFolder(tmp_path / "run").session_end.exists()
