"""Bad batches in whole runs: told with rank and rows, and skipped, rolled back or the end, alike on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from on_ranks import on_ranks
from small_run import same_tensors, small_config, stage, write_text

from megahead.config import RunConfig
from megahead.distributed import Group, Launch
from megahead.errors import UserError
from megahead.pretraining import Feed, StepBatches
from megahead.report.metrics import read_metrics
from megahead.train import pretrain

BAD = 24
"""First sample of the fourth step, whose second micro-batch is bad on the last rank."""


def run_with(group: Group, config: RunConfig, factor: float, bad: tuple[int, ...] = (BAD,)) -> str:
    """A run in which the losses of some micro-batches of the last rank come out `factor` times as high."""
    step = Feed.step

    def bad_step(feed: Feed, first_sample: int) -> StepBatches:
        batches = step(feed, first_sample)
        if first_sample in bad and group.rank == group.size - 1:
            micro = batches.micro_batches[1]
            batches.micro_batches[1] = replace(micro, loss_scale=micro.loss_scale * factor)
        return batches

    Feed.step = bad_step  # type: ignore[method-assign]
    try:
        return pretrain(config, Launch()).ending
    except UserError as error:
        return str(error)


def faults(folder: Path) -> list[dict[str, Any]]:
    """What was logged of bad steps."""
    records = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [record["fault"] for record in records if "fault" in record]


@pytest.mark.parametrize("zero", [0, 2])
def test_nan_in_one_ranks_batch_is_skipped_and_told_with_rank_and_rows(
    tmp_path: Path, zero: int, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, stage(zero))
    assert on_ranks(2, run_with, config, math.nan) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    assert fault["where"] == [{"rank": 1, "first": BAD + 6, "last": BAD + 7}]
    assert (fault["kind"], fault["action"], fault["scale"]) == ("loss not finite", "skip", 1.0)
    told = capfd.readouterr().out
    assert "step 4: loss not finite" in told
    assert "rank 1, rows 30 to 31; 1 skipped so far: skipped" in told
    curve = read_metrics(tmp_path / "run").training
    assert [record["step"] for record in curve] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(record["loss"]) for record in curve)
    assert curve[-1]["skipped_steps"] == 1


@pytest.mark.parametrize("zero", [0, 2])
def test_rollback_takes_back_what_was_learned_and_goes_on_with_new_rows(tmp_path: Path, zero: int) -> None:
    """The bad step is the fourth, the checkpoint of step 2: step 3 is taken again with the fifth's rows."""
    write_text(tmp_path)
    changes = stage(zero) | {"training.checkpoint_every": 2, "training.steps": 4}
    rolled = small_config(tmp_path, changes | {"faults.bad_step": "rollback"})
    assert on_ranks(2, run_with, rolled, math.nan) == ["finished"] * 2
    assert faults(tmp_path / "run")[0]["action"] == "rollback"
    passed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "passed")})
    assert on_ranks(2, run_with, passed, math.nan, (16, BAD)) == ["finished"] * 2  # never learned from either
    assert same_tensors(tmp_path / "run", tmp_path / "passed")
    assert read_metrics(tmp_path / "run").training[-1]["tokens"] == 6 * 8 * 24


def test_rollback_before_the_first_checkpoint_skips(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"faults.bad_step": "rollback", "training.checkpoint_every": 6})
    assert on_ranks(1, run_with, config, math.nan) == ["finished"]
    assert "no checkpoint to go back to yet: skipped" in capfd.readouterr().out


def test_stop_ends_all_ranks_with_the_sentence_and_harms_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"faults.bad_step": "stop"})
    first, second = on_ranks(2, run_with, config, math.inf)
    assert first == second
    assert "steps must be finite and without spikes, but step 4: loss not finite" in first
    assert "rank 1, rows 30 to 31" in first
    # the checkpoint of step 3 is unharmed, and with another policy the run goes on
    assert on_ranks(2, run_with, small_config(tmp_path), math.inf) == ["finished"] * 2


SPIKY = {"faults.spike_window": 16, "faults.spike_score": 5, "training.steps": 12, "training.checkpoint_every": 4}


@pytest.mark.parametrize(("policy", "skipped"), [("note", 0), ("skip", 1), ("rollback", 1)])
def test_a_spike_is_seen_and_answered(tmp_path: Path, policy: str, skipped: int) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, SPIKY | {"faults.spike": policy})
    assert on_ranks(2, run_with, config, 50.0, (80,)) == ["finished"] * 2
    (fault,) = faults(tmp_path / "run")
    assert fault["where"] == [{"rank": 1, "first": 86, "last": 87}]
    assert (fault["kind"], fault["action"]) == ("spike", "apply" if policy == "note" else policy)
    last = read_metrics(tmp_path / "run").training[-1]
    assert (last["step"], last["skipped_steps"]) == (12, skipped)


def test_bad_step_after_bad_step_ends_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"faults.most_in_a_row": 3})
    (sentence,) = on_ranks(1, run_with, config, math.nan, tuple(range(BAD, 400, 8)))
    assert "3 bad in a row" in sentence
