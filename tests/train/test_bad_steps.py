"""Bad batches in whole runs: told with rank and rows, and skipped, rolled back or the end, alike on every rank."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megahead.checkpoints.reading import open_checkpoint
from megahead.report.read import read_metrics
from support.bad_rows import BAD, run_with
from support.long import long
from support.on_ranks import on_ranks
from support.precisions import NEEDS_FP16
from support.small_run import same_tensors, shipped, small_config, write_text


def faults(folder: Path) -> list[dict[str, Any]]:
    """What was logged of bad steps."""
    records = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [record["fault"] for record in records if "fault" in record]


def finite_blocks(run: Path) -> bool:
    """Whether the newest checkpoint is."""
    newest = open_checkpoint(run)
    return all(newest.read(name).isfinite().all() for name in newest.names())


def on(settings: str, precision: str = "fp32") -> dict[str, Any]:
    """The change that asks for a file of `configs/deepspeed`; fp16 with a loss scale that fits from the first step."""
    content = shipped(settings) | ({"fp16": {"initial_scale_power": 4}} if precision == "fp16" else {})
    return {"engine.deepspeed": content, "engine.precision": precision}


def in_rows(settings: str) -> dict[str, Any]:
    """The same with the embedding in rows."""
    return on(settings) | {"engine.embedding": "rows"}


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ("zero0", "fp32"),
        long("zero2", "fp32"),
        long("zero1_offload", "fp32"),
        ("zero2_offload", "bf16"),
        long("zero3_offload", "fp16", marks=[NEEDS_FP16]),
    ],
)
def test_nan_in_one_ranks_batch_is_skipped_and_told_with_rank_and_rows(
    tmp_path: Path, settings: str, precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, on(settings, precision))
    assert on_ranks(2, run_with, config, math.nan) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    assert fault["where"] == [{"rank": 1, "first": BAD + 6, "last": BAD + 7}]
    scale = 16.0 if precision == "fp16" else 1.0
    assert (fault["kind"], fault["action"], fault["scale"]) == ("loss not finite", "skip", scale)
    told = capfd.readouterr().out
    assert "step 4: loss not finite" in told
    assert "rank 1, samples 30 to 31; 1 skipped so far: skipped" in told
    assert "OVERFLOW" not in told  # DeepSpeed's word, which would be wrong
    curve = read_metrics(tmp_path / "run").training
    assert [record["step"] for record in curve] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(record["loss"]) for record in curve)
    assert curve[-1]["skipped_steps"] == 1
    assert finite_blocks(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ("zero0", "fp32"),
        long("zero2_offload", "fp32"),
        long("zero1_offload", "bf16"),
        ("zero2_offload", "bf16"),
        pytest.param("zero1_offload", "fp16", marks=NEEDS_FP16),
        long("zero3_offload", "fp16", marks=[NEEDS_FP16]),
    ],
)
def test_gradients_that_are_not_finite_once_are_skipped_once(tmp_path: Path, settings: str, precision: str) -> None:
    """The loss is, but not the sum of the squares of its gradients."""
    write_text(tmp_path)
    assert on_ranks(2, run_with, small_config(tmp_path, on(settings, precision)), 1e36) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    kind = "overflow" if precision == "fp16" else "gradients not finite"
    assert (fault["kind"], fault["action"], fault["where"]) == (kind, "skip", [{"rank": None, "first": 24, "last": 31}])
    last = read_metrics(tmp_path / "run").training[-1]
    assert (last["step"], last["skipped_steps"]) == (6, 1)
    assert finite_blocks(tmp_path / "run")


def test_a_step_whose_row_gradients_are_not_finite_is_skipped(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(2, run_with, small_config(tmp_path, in_rows("zero1")), 1e36) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    assert (fault["kind"], fault["action"]) == ("gradients not finite", "skip")
    assert read_metrics(tmp_path / "run").training[-1]["skipped_steps"] == 1
    assert finite_blocks(tmp_path / "run")


@NEEDS_FP16
@pytest.mark.parametrize("settings", ["zero1", long("zero1_offload"), long("zero2_offload")])
def test_fp16_finds_its_loss_scale_and_trains(tmp_path: Path, settings: str) -> None:
    """From a scale that overflows at first."""
    write_text(tmp_path)
    changes = on(settings, "fp16") | {"engine.deepspeed": shipped(settings) | {"fp16": {"initial_scale_power": 24}}}
    assert on_ranks(2, run_with, small_config(tmp_path, changes), 1.0) == ["finished"] * 2
    assert {fault["kind"] for fault in faults(tmp_path / "run")} == {"overflow"}
    curve = read_metrics(tmp_path / "run").training
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.2
    assert finite_blocks(tmp_path / "run")


@pytest.mark.parametrize(
    "settings",
    [
        on("zero0"),
        long(on("zero2")),
        long(on("zero1_offload", "bf16")),
        long(on("zero2_offload")),
        long(in_rows("zero0")),
        in_rows("zero2"),
    ],
    ids=["0", "2", "1 offloaded in bf16", "2 offloaded", "0 in rows", "2 in rows"],
)
def test_rollback_takes_back_what_was_learned_and_goes_on_with_new_rows(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The bad step is the fourth, the checkpoint of step 2: step 3 is taken again with the fifth's rows."""
    write_text(tmp_path)
    changes = settings | {"training.checkpoint_every": 2, "training.steps": 4}
    rolled = small_config(tmp_path, changes | {"faults.bad_step": "rollback"})
    assert on_ranks(2, run_with, rolled, math.nan) == ["finished"] * 2
    assert faults(tmp_path / "run")[0]["action"] == "rollback"
    passed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "passed")})
    assert on_ranks(2, run_with, passed, math.nan, (16, BAD)) == ["finished"] * 2  # never learned from either
    assert same_tensors(tmp_path / "run", tmp_path / "passed")
    assert read_metrics(tmp_path / "run").training[-1]["tokens"] == 6 * 8 * 24


def test_rollback_before_the_first_checkpoint_skips(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    faults = {"bad_step": "rollback", "most_in_a_row": 2}
    config = small_config(tmp_path, {"faults": faults, "training.checkpoint_every": 6})
    assert on_ranks(1, run_with, config, math.nan, (8, BAD)) == ["finished"]  # which are no rollbacks without a save
    assert capfd.readouterr().out.count("no checkpoint to go back to yet: skipped") == 2


def on_tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of each of its curves."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {name: [event.step for event in board.Scalars(name)] for name in board.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_crash_and_after_a_rollback(tmp_path: Path) -> None:
    write_text(tmp_path)
    every = {"training.checkpoint_every": 2, "training.evaluate_every": 2, "faults.bad_step": "rollback"}
    config = small_config(tmp_path, every)
    on_ranks(2, run_with, config, math.nan)
    (lost,) = (tmp_path / "run/checkpoints").glob("step-00000006-*")
    shutil.rmtree(lost)
    on_ranks(2, run_with, config, math.nan)
    curves = on_tensorboard(tmp_path / "run")
    assert curves["train/loss"] == [1, 2, 3, 4, 5, 6]
    assert curves["validation/loss"] == [2, 4, 6]
    assert {tuple(steps) for steps in curves.values()} == {(1, 2, 3, 4, 5, 6), (2, 4, 6)}


def test_a_line_after_a_rollback_is_the_mean_of_the_steps_that_count(tmp_path: Path) -> None:
    """Step 3 was taken back, steps 1 and 2 were not; one line is written, at the end."""
    write_text(tmp_path)
    changes = {"training.checkpoint_every": 2, "training.steps": 4, "faults.bad_step": "rollback"}
    for name, seconds in (("run", 1e9), ("every step", 0)):
        config = small_config(tmp_path, changes | {"training.log_seconds": seconds, "output_dir": str(tmp_path / name)})
        assert on_ranks(1, run_with, config, math.nan) == ["finished"]
    (line,), every = (read_metrics(tmp_path / name).training for name in ("run", "every step"))
    assert [record["step"] for record in every] == [1, 2, 3, 4]
    assert line["loss"] == pytest.approx(sum(record["loss"] for record in every) / 4)


def test_rollback_never_goes_on_to_a_history_that_the_run_turned_away_from(tmp_path: Path) -> None:
    """Resumed from step 2 with steps 4 and 6 beside it, the next step is bad: back to 2, and not on to 6."""
    write_text(tmp_path)
    every_two = {"training.checkpoint_every": 2, "faults.bad_step": "rollback"}
    assert on_ranks(1, run_with, small_config(tmp_path, every_two), 1.0) == ["finished"]
    older = str(tmp_path / "run/checkpoints/step-00000002")
    assert on_ranks(1, run_with, small_config(tmp_path, every_two), math.nan, (16,), older) == ["finished"]
    (fault,) = faults(tmp_path / "run")
    assert fault["action"] == "rollback"
    curve = read_metrics(tmp_path / "run").training
    assert [(record["step"], record["tokens"] // (8 * 24)) for record in curve] == [
        (1, 1), (2, 2), (3, 4), (4, 5), (5, 6), (6, 7),
    ]  # fmt: skip


def test_stop_ends_all_ranks_with_the_sentence_and_harms_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"faults.bad_step": "stop"})
    first, second = on_ranks(2, run_with, config, math.inf)
    assert first == second
    assert "steps must be finite and without spikes, but step 4: loss not finite" in first
    assert "rank 1, samples 30 to 31" in first
    # the checkpoint of step 3 is unharmed, and with another policy the run goes on
    assert on_ranks(2, run_with, small_config(tmp_path), math.inf) == ["finished"] * 2


SPIKY = {"faults.spike_window": 16, "faults.spike_score": 5, "training.steps": 12, "training.checkpoint_every": 4}


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("note", "zero0"),
        ("skip", "zero0"),
        ("rollback", "zero0"),
        long("skip", "zero1_offload"),
        long("skip", "zero2_offload"),
    ],
)
def test_a_spike_is_seen_and_answered(tmp_path: Path, policy: str, settings: str) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, SPIKY | {"faults.spike": policy} | on(settings))
    assert on_ranks(2, run_with, config, 50.0, (80,)) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    assert fault["where"] == [{"rank": 1, "first": 86, "last": 87}]
    assert (fault["kind"], fault["action"]) == ("spike", "apply" if policy == "note" else policy)
    last = read_metrics(tmp_path / "run").training[-1]
    assert (last["step"], last["skipped_steps"]) == (12, 0 if policy == "note" else 1)
    state = open_checkpoint(tmp_path / "run").state
    assert (state["spikes"], state["rollbacks"]) == (1, policy == "rollback")
    assert finite_blocks(tmp_path / "run")


def test_bad_step_after_bad_step_ends_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"faults.most_in_a_row": 3})
    (sentence,) = on_ranks(1, run_with, config, math.nan, tuple(range(BAD, 400, 8)))
    assert "3 bad in a row" in sentence
