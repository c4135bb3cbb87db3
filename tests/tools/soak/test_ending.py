"""A soak's end: its twin has as many ranks at every step, and is compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.soak.ending import Stretch, compare, finished, stretches
from megahead.train.run import pretrain
from support.forked import forked
from support.small_run import small_config, write_text


def test_stretches_are_those_that_led_to_the_end(tmp_path: Path) -> None:
    def session(continues: int, ranks: int) -> dict[str, Any]:
        return {"step": continues, "session": {"mesh": {"data": ranks}}}

    def steps(first: int, last: int) -> list[dict[str, Any]]:
        return [{"step": step} for step in range(first, last + 1)]

    log = [session(0, 2), *steps(1, 9), session(6, 1), *steps(7, 8), session(6, 2), *steps(7, 12), session(12, 2)]
    log += [*steps(13, 20), session(18, 1), *steps(19, 22), session(22, 4), *steps(23, 25)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in log))
    assert stretches(metrics) == [Stretch(18, 2), Stretch(22, 1), Stretch(25, 4)]


def test_runs_are_compared_bit_for_bit(tmp_path: Path) -> None:
    write_text(tmp_path)
    for name, seed in (("run", 1), ("twin", 1), ("other", 2)):
        changes = {"output_dir": str(tmp_path / name), "seed": seed, "data.validation": None, "training.steps": 3}
        forked(pretrain, small_config(tmp_path, changes))
    assert finished(tmp_path / "run")
    same, other = (compare(tmp_path / "run", tmp_path / name) for name in ("twin", "other"))
    assert (same.step, same.same_bits, same.same_rows) == (3, True, True)
    assert same.largest_difference == same.largest_loss_difference == 0
    assert not other.same_bits
    assert other.largest_difference > 0
    assert other.largest_loss_difference > 0
