"""A rank that dies, fails or hangs: the others end within a stated time and say which one it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killable import Sabotage, codes, said, start_ranks
from small_run import small_config, stage, write_text

from megahead.train.meters import Meters


def at_step(step: int, victim: int, act: Callable[[], Any]) -> Sabotage:
    """`act()` on rank `victim` once it has taken `step` steps."""

    def sabotage(rank: int) -> None:
        note = Meters.step

        def noted(meters: Meters, report: Any, state: Any) -> None:
            note(meters, report, state)
            if rank == victim and state.step == step:
                act()

        Meters.step = noted  # type: ignore[method-assign]

    return sabotage


def fail() -> None:
    raise ValueError("a mistake of its own")


@pytest.mark.parametrize(("victim", "zero"), [(0, 0), (1, 0), (1, 2)])
def test_a_rank_that_exits_is_named_by_the_other_at_once(tmp_path: Path, victim: int, zero: int) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, stage(zero) | {"engine.timeout_seconds": 100, "training.checkpoint_every": 1})
    ranks = start_ranks(config, 2, tmp_path, sabotage=at_step(3, victim, lambda: os._exit(9)))
    ranks[victim].join(60)
    died = time.monotonic()
    assert codes(ranks)[1 - victim] == 2, said(tmp_path, 1 - victim)
    assert time.monotonic() - died < 30
    told = said(tmp_path, 1 - victim)
    assert f"rank {victim} died or hangs (no answer within 5 s); start again to resume." in told
    assert "Traceback" not in told
    assert codes(start_ranks(config, 2, tmp_path)) == [0, 0]
    assert "resumed" in said(tmp_path, 0)


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.timeout_seconds": 6, "training.steps": 50})
    ranks = start_ranks(config, 2, tmp_path, sabotage=at_step(3, 1, lambda: time.sleep(600)))
    ranks[0].join(60)
    ranks[1].kill()
    assert codes(ranks) == [2, -signal.SIGKILL]
    assert "rank 1 died or hangs" in said(tmp_path, 0)


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.steps": 50})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=at_step(3, 1, fail))) == [2, 1]
    assert "rank 1 ended with ValueError: a mistake of its own" in said(tmp_path, 0)


def test_a_rank_that_never_comes_is_told(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.timeout_seconds": 3})

    def absent(rank: int) -> None:
        if rank == 1:
            os._exit(9)

    assert codes(start_ranks(config, 2, tmp_path, sabotage=absent)) == [2, 9]
    assert "2 ranks must meet at 127.0.0.1:" in said(tmp_path, 0)
