"""The engine's benchmark takes real steps, and its ratios are those of the steps it timed."""

from __future__ import annotations

import pytest

from benchmarks import engines
from benchmarks.command import build_config

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 100}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[engines.Rounds]:
    """What is timed."""
    seen: list[engines.Rounds] = []
    run_interleaved = engines.run_interleaved
    monkeypatch.setattr(engines, "run_interleaved", lambda *given: seen.append(run_interleaved(*given)) or seen[-1])
    return seen


def test_stages_are_timed_beside_a_loop_without_an_engine(rounds: list[engines.Rounds]) -> None:
    bare, engine = engines.time_engines(build_config(SHAPE, 2, 16, "engine.device=cpu"), [1], num_rounds=3)
    assert (bare[""], bare["wall ratio"], bare["CPU ratio"]) == ("bare torch", "1.000", "1.000")
    assert engine[""] == "ZeRO 1"
    ratios = sorted(steps[1][1] / steps[0][1] for steps in rounds[0])
    assert engine["CPU ratio"] == f"{ratios[1]:.3f}"
