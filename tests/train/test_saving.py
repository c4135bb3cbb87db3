"""How a run saves: which checkpoints stay, behind the training's back, and what happens when it cannot."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from megahead.checkpoints.format import Snapshot
from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.report.read import read_metrics
from megahead.run_folder import RunFolder
from megahead.train.run import pretrain
from megahead.train.session import _write_run_files
from support.bad_rows import run_with
from support.killable import codes, said, start_ranks
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, write_text


def steps_on_disk(run: Path) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in (run / "checkpoints").glob("step-*"))


def test_the_newest_the_milestones_and_the_best_stay(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {
        "training.steps": 12,
        "training.checkpoint_every": 1,
        "training.evaluate_every": 1,
        "training.keep_checkpoints": 2,
        "training.keep_every": 5,
        "training.keep_best": 1,
        "optimizer.learning_rate": 0.05,
    }
    config = small_config(tmp_path, changes)
    assert on_ranks(1, run, config) == ["finished"]
    records = [orjson.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    losses = {record["step"]: record["validation"]["loss"] for record in records if "validation" in record}
    best = min(losses, key=losses.__getitem__)
    assert steps_on_disk(tmp_path / "run") == sorted({5, 10, 11, 12, best})


def test_the_last_checkpoint_knows_the_last_evaluation_which_is_made_once(tmp_path: Path) -> None:
    """Also where evaluations are not due at the last step: the best are chosen by it."""
    write_text(tmp_path)
    assert on_ranks(1, run, small_config(tmp_path, {"training.evaluate_every": 4})) == ["finished"]
    (four, six) = read_metrics(tmp_path / "run").validation
    assert (four["step"], six["step"]) == (4, 6)
    state = open_checkpoint(tmp_path / "run").state["validation"]
    assert (state["step"], state["loss"]) == (6, six["loss"])
    assert state["data"].startswith("10 samples of ")


def test_a_checkpoint_that_was_saved_before_the_last_evaluation_is_saved_again_with_it(tmp_path: Path) -> None:
    """As when the time is over at a step that was saved, but not evaluated."""
    write_text(tmp_path)
    changes = {"training.max_seconds": 1e-6, "training.checkpoint_every": 1, "training.evaluate_every": 4}
    assert on_ranks(2, run, small_config(tmp_path, changes)) == ["out of time"] * 2
    (result,) = read_metrics(tmp_path / "run").validation
    state = open_checkpoint(tmp_path / "run").state["validation"]
    assert (state["step"], state["loss"]) == (1, result["loss"])
    newest = open_checkpoint(tmp_path / "run").folder
    assert on_ranks(2, run, small_config(tmp_path, changes)) == ["out of time"] * 2  # and nothing more is trained
    assert (open_checkpoint(tmp_path / "run").folder, len(read_metrics(tmp_path / "run").validation)) == (newest, 1)


def test_time_that_is_over_at_the_last_step_does_not_leave_the_run_unfinished(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.max_seconds": 1e-6, "training.steps": 1, "schedule.warmup_steps": 0})
    assert on_ranks(2, run, config) == ["finished"] * 2


def run(group: Group, config: RunConfig) -> str:
    try:
        return pretrain(config, Launch()).ending
    except UserError as error:
        return str(error)


def write_slowly(seconds: float) -> None:
    write = Snapshot.write

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return write(*args)

    Snapshot.write = slowly  # type: ignore[method-assign]


def run_with_slow_writes(group: Group, config: RunConfig, seconds: float) -> str:
    write_slowly(seconds)
    return run(group, config)


def run_to_a_bad_step(group: Group, config: RunConfig) -> tuple[str, list[int]]:
    """With the checkpoints on disk when it ends."""
    write_slowly(0.3)
    return run_with(group, config, math.inf), steps_on_disk(Path(config.folder()))


def test_a_save_in_the_background_survives_an_error_in_the_next_step(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.save_in_background": True, "faults.bad_step": "stop"})
    for sentence, steps in on_ranks(2, run_to_a_bad_step, config):
        assert "step 4: loss not finite" in sentence
        assert steps == [3]


def stalls(run: Path) -> list[float]:
    records = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return [record["checkpoint"]["stall_seconds"] for record in records if "checkpoint" in record]


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_a_second_one_waits(tmp_path: Path) -> None:
    write_text(tmp_path)
    plan = {"training.steps": 8, "training.checkpoint_every": 4, "training.evaluate_every": 100}
    at_once = small_config(tmp_path, plan | {"output_dir": str(tmp_path / "at once")})
    behind = small_config(tmp_path, plan | {"training.save_in_background": True})
    for config in (at_once, behind):
        assert on_ranks(2, run_with_slow_writes, config, 1.5) == ["finished"] * 2
    assert min(stalls(tmp_path / "at once")) > 1.5
    assert stalls(tmp_path / "run")[0] < 1  # the second waited for the first
    assert same_tensors(tmp_path / "run", tmp_path / "at once")
    for folder in (tmp_path / "run/checkpoints").glob("step-*"):
        open_checkpoint(folder).verify()
        assert same_tensors(folder, tmp_path / "at once/checkpoints" / without_digits(folder.name))


def run_with_a_failing_write(group: Group, config: RunConfig) -> str:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    if group.rank == 1:
        Snapshot.write = fail  # type: ignore[assignment, method-assign]
    return run(group, config)


def test_what_goes_wrong_in_the_background_ends_the_run_soon_on_all_ranks(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"training.steps": 2000, "training.checkpoint_every": 2, "training.save_in_background": True}
    first, second = on_ranks(2, run_with_a_failing_write, small_config(tmp_path, changes))
    assert first == second
    assert "must take a checkpoint, but cannot ([Errno 5] Input/output error); older checkpoints are unharmed" in first


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: room for two checkpoints of these runs, not for three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_full_disk_is_told_with_what_is_missing_and_harms_nothing(
    tmp_path: Path, small_disk: Path, background: bool
) -> None:
    write_text(tmp_path)
    changes = {
        "output_dir": str(small_disk / "run"),
        "training.steps": 40,
        "training.checkpoint_every": 1,
        "training.evaluate_every": 100,
        "training.save_in_background": background,
    }
    assert codes(start_ranks(small_config(tmp_path, changes), 2, tmp_path)) == [2, 2], said(tmp_path, 0)
    told = said(tmp_path, 0) + said(tmp_path, 1)  # one rank speaks for both
    assert told.count("bytes, but") == told.count("bytes are missing; free some") == 1
    assert "Traceback" not in told
    kept = steps_on_disk(small_disk / "run")
    assert kept == list(range(1, len(kept) + 1))
    for step in kept:
        open_checkpoint(small_disk / f"run/checkpoints/step-{step:08d}").verify()
    fewer = small_config(tmp_path, changes | {"training.keep_checkpoints": 1, "training.steps": kept[-1] + 2})
    assert codes(start_ranks(fewer, 2, tmp_path)) == [2, 2]  # still no room for one more beside the old ones
    for step in kept[:-1]:
        for file in folder_of(small_disk / "run", step).iterdir():
            os.unlink(file)  # noqa: PTH108
    assert codes(start_ranks(fewer, 2, tmp_path)) == [0, 0], said(tmp_path, 0)


def test_a_full_disk_leaves_the_config_of_the_last_session(tmp_path: Path) -> None:
    config, folder = small_config(tmp_path), RunFolder(tmp_path)
    _write_run_files(folder, config)
    before, limit = folder.config.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _write_run_files(folder, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert folder.config.read_bytes() == before
    assert list(tmp_path.iterdir()) == [folder.config]
