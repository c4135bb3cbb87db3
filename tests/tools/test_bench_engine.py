"""The engine's benchmark takes real steps, alone and on ranks, and its ratios are those of the steps it timed."""

from __future__ import annotations

from pathlib import Path

from bench_engine import make_config, summary

from benchmarks.engines import Contender, on_one_rank, on_ranks

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 100}


def timed(field: list[Contender], count: int) -> list[list[tuple[float, float]]]:
    rounds = [[contender.step() for contender in field] for _ in range(count)]
    for contender in field:
        contender.stop()
    return rounds


def test_stages_are_timed_beside_a_loop_without_an_engine() -> None:
    field = on_one_rank(make_config(2, 16, SHAPE), [1])
    rounds = timed(field, 3)
    bare, engine = summary(field, rounds)
    assert (bare[""], bare["wall ratio"], bare["CPU ratio"]) == ("bare torch", "1.000", "1.000")
    assert engine[""] == "ZeRO 1"
    ratios = sorted(steps[1][1] / steps[0][1] for steps in rounds)
    assert engine["CPU ratio"] == f"{ratios[1]:.3f}"
    assert "efficiency" not in engine


def test_ranks_are_timed_together_and_apart(tmp_path: Path) -> None:
    field = on_ranks(make_config(2, 16, SHAPE), [0], 2, str(tmp_path))
    lines = summary(field, timed(field, 2))
    assert [line[""] for line in lines] == ["1 rank", "2 apart", "2 ranks, ZeRO 0"]
    assert lines[0]["efficiency"] == "100%"
    assert all(float(str(line["wall ratio"])) > 0 for line in lines)
