"""Numbers in what people read: one of a thing or several, durations, counts, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.config.plan import RunPlan
from megahead.train.preflight import describe_run
from megahead.wording import (
    format_duration,
    format_gib,
    format_numbers,
    format_range,
    format_si,
    pluralize,
    to_milliseconds,
)
from support.small_run import small_config


def test_one_is_one_as_it_is_written() -> None:
    assert [pluralize(number, "data rank") for number in (0, 1, 2, 12345)] == [
        "0 data ranks",
        "1 data rank",
        "2 data ranks",
        "12,345 data ranks",
    ]
    assert [pluralize(number, "epoch", ".2g") for number in (0.999, 1.04, 0.5)] == ["1 epoch", "1 epoch", "0.5 epochs"]
    assert [format_range("row", range(7, stop)) for stop in (8, 2009)] == ["row 7", "rows 7 to 2,008"]
    assert [format_numbers("rank", ranks) for ranks in ([3], [0, 3])] == ["rank 3", "ranks 0, 3"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_described_run_has_one_step_or_two_steps(tmp_path: Path, size: int) -> None:
    sizes: dict[str, Any] = {"batch.global_size": size, "batch.micro_size": size, "training.steps": size}
    model = {"model.num_layers": size, "model.num_heads": size, "schedule.warmup_steps": size}
    config = small_config(tmp_path, sizes | model | {"objective.negatives": size})
    lines = dict(describe_run(RunPlan.of(config)))
    s = "s" if size > 1 else ""
    assert lines["model"].startswith(f"gpt_neox, {size} layer{s} x 32, {size} head{s}, ")
    assert lines["length"] == f"{size} step{s}, {size * size * 24} tokens"
    assert lines["schedule"].startswith(f"cosine, {size} step{s} of warm-up")
    assert lines["batch"].endswith(f"{size} row{s} x 1 accumulation x 1 data rank")
    assert f"candidates from {size} row{s} ({size * 24} targets), {size} unigram negative{s}" in lines["objective"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.42, "0.4s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (75, "1m15s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (200_000, "2d07h"),
        (float("inf"), "?"),
    ],
)
def test_a_duration_is_short_at_any_length(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts_and_sizes() -> None:
    assert [format_si(n) for n in (999, 999.7, 12_345, 999_960, 2e6, 3e9)] == [
        "999",
        "1.0k",
        "12.3k",
        "1.0M",
        "2.0M",
        "3.0G",
    ]
    assert format_gib(3 * 2**29) == "1.50 GiB"


def test_short_times_keep_digits_that_long_ones_do_not_need() -> None:
    assert [to_milliseconds(seconds) for seconds in (0.0123456, 0.1583, 1.2345)] == [12.35, 158, 1234]
