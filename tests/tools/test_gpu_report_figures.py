"""What a measurement on a GPU comes to: targets, ratios, trainings side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_parts.page import judged, steps_compared, trainings_compared
from gpu_parts.plan import Outcome
from support.gpu_parts import line, outcome


def loss_line(form: str, hidden: int, seconds: float, **more: float) -> dict[str, Any]:
    return {"N": 16384, "hidden": hidden, "form": form, "seconds": seconds} | more


def test_each_target_is_met_or_missed_or_was_not_measured() -> None:
    loss = [loss_line("ours", 512, 1.0, **{"of rate": 0.6}), loss_line("ours", 2048, 1.0, **{"of rate": 0.6})]
    loss += [loss_line("liger", 512, 0.9)]
    steps = [line("headless", 10, 100), line("vanilla", 37, 400)]
    rows = judged(
        [outcome("loss", loss), outcome("step-70m", steps), outcome("waits-1", [{"who": "megahead", "a step": 3.0}])]
    )
    assert [(row["part"], row["found"], row[""]) for row in rows] == [
        ("loss", "0.6", "met"),
        ("loss", "0.6", "missed"),
        ("loss", "0.9", "missed"),
        ("loss", None, "not measured"),
        ("step-70m", "0.925", "met"),
        ("step-70m", "0.41", "met"),
        ("waits-1", "3", "missed"),
    ]


def test_steps_are_compared_with_what_operations_alone_would_give() -> None:
    lines = [line("headless", 10, 100), line("vanilla", 30, 400), line("headless, compiled", 8, 100)]
    outcome = Outcome("step-70m", "what?", [], "measured", lines=[*lines, line("vanilla, compiled", 24, 400)])
    plain, compiled = steps_compared([outcome, Outcome("other", "", [], "failed")])
    assert (plain["part"], plain["times as fast"], plain["by operations"], plain["of it"]) == ("step-70m", 3, 4, "75%")
    assert (compiled["part"], compiled["headless, ms"], compiled["MFU"]) == ("step-70m, compiled", 8, "41.0%")


def log(folder: Path, name: str, seconds_a_step: float, steps: int, perplexity: Callable[[int], float]) -> None:
    path = folder / "runs" / name / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    records = []
    for step in range(1, steps + 1):
        where = {"step": step, "tokens": step * 100, "seconds": step * seconds_a_step}
        records += [where | {"loss": 1.0}, where | {"validation": {"perplexity": perplexity(step)}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_trainings_are_compared_at_equal_tokens_and_in_equal_time(tmp_path: Path) -> None:
    log(tmp_path, "train-x-headless", 1.0, 8, lambda step: 2.0 ** (10 - step))
    log(tmp_path, "train-x-vanilla", 4.0, 3, lambda step: 2.0 ** (12 - step))
    (row,) = trainings_compared(tmp_path, ["train-x-headless", "train-x-vanilla", "loss"])
    assert row["headless after these tokens"] == pytest.approx(2.0**7)  # 3 steps
    assert row["vanilla after these tokens"] == pytest.approx(2.0**9)
    assert row["headless after these seconds"] == pytest.approx(2.0**2)  # 8 seconds
    assert row["vanilla after these seconds"] == pytest.approx(2.0**10)  # 2 steps
    assert (row["headless, tokens/s"], row["vanilla, tokens/s"]) == (100, 25)
    assert trainings_compared(tmp_path, ["train-x-headless"]) == []
