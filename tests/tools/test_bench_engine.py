"""The engine's benchmark takes real steps, alone and on ranks, and its ratios are those of the steps it timed."""

from __future__ import annotations

import pytest

from benchmarks import engines
from benchmarks.command import build_config
from support.forked import run_script

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 100}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[engines.Rounds]:
    """What is timed."""
    seen: list[engines.Rounds] = []
    run_interleaved = engines.run_interleaved_steps
    monkeypatch.setattr(
        engines, "run_interleaved_steps", lambda *given: seen.append(run_interleaved(*given)) or seen[-1]
    )
    return seen


def test_stages_are_timed_beside_a_loop_without_an_engine(rounds: list[engines.Rounds]) -> None:
    bare, engine = engines.time_engines(build_config(SHAPE, 2, 16, "engine.device=cpu"), [1], num_ranks=1, num_rounds=3)
    assert (bare[""], bare["wall ratio"], bare["CPU ratio"]) == ("bare torch", "1.000", "1.000")
    assert engine[""] == "ZeRO 1"
    ratios = sorted(steps[1][1] / steps[0][1] for steps in rounds[0])
    assert engine["CPU ratio"] == f"{ratios[1]:.3f}"
    assert "efficiency" not in engine


def test_the_host_dispatches_no_more_operators_than_a_plain_loop() -> None:
    """Each is a launch on a GPU, which a small model waits for."""
    done = run_script("tools/bench_engine.py", "--host", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    counts = {
        line.split()[0]: int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(tuple("pme"))
    }
    assert list(counts) == ["plain", "module", "engine"]
    assert counts["module"] < counts["plain"]
    assert counts["engine"] <= counts["module"] + 5


def test_ranks_are_timed_together_and_apart() -> None:
    lines = engines.time_engines(build_config(SHAPE, 2, 16, "engine.device=cpu"), [0], num_ranks=2, num_rounds=2)
    assert [line[""] for line in lines] == ["1 rank", "2 apart", "2 ranks, ZeRO 0"]
    assert lines[0]["efficiency"] == "100%"
    assert all(float(str(line["wall ratio"])) > 0 for line in lines)
