"""Faults that no loss shows: a slow rank is named, and a flipped bit is found and answered."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megahead.engine.engine import Engine
from megahead.engine.state import weight_checksums
from megahead.report.read import events_of, read_runs
from megahead.train.faults import WINDOW_STEPS, ReplicaMismatch, SlowRank, StragglerDetector, weight_mismatch
from support.killable import Sabotage, codes, said, start_ranks
from support.long import long
from support.named import without_digits
from support.small_run import same_tensors, small_config, stage, write_text


def windows(stragglers: StragglerDetector, *steps: list[float]) -> list[SlowRank | None]:
    """What is found at the end of a window of each of these steps."""
    return [[stragglers.update(step) for _ in range(WINDOW_STEPS)][-1] for step in steps]


def test_a_slow_rank_is_told_once_while_it_stays_slow() -> None:
    stragglers, usual, slow = StragglerDetector("abc", 2.0), [1.0, 1.1, 0.9], [1.0, 2.5, 0.9]
    first = SlowRank(1, "b", 2.5, 0.95)
    assert windows(stragglers, usual, slow, slow, usual, slow) == [None, first, None, None, first]
    assert first.message(40) == (
        "step 40: rank 1 on b is slow: its forward passes take 2.5 s a step, 2.6 times as long as the other ranks', "
        "which wait for it"
    )


def test_single_slow_steps_one_rank_and_differences_of_a_moment_are_nothing() -> None:
    stragglers = StragglerDetector("ab", 2.0)
    assert [stragglers.update([1.0, 60.0 if k % 3 == 0 else 1.0]) for k in range(WINDOW_STEPS)] == [None] * WINDOW_STEPS
    assert windows(stragglers, [0.0005, 0.0016]) == [None]


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_memory_of_steps_ends_with_their_window(hosts: str) -> None:
    stragglers = StragglerDetector(hosts, 2.0)
    sizes = [windows(stragglers, [1.0] * len(hosts)) and len(pickle.dumps(stragglers)) for _ in range(3)]
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_a_checksum(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 5, dtype=dtype)
    before = weight_checksums([weight, torch.ones(())])
    for bit in range(8 * weight.element_size()):
        flipped = weight.clone()
        whole = flipped.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        top = bit == 8 * weight.element_size() - 1
        whole[3, 2] ^= torch.iinfo(whole.dtype).min if top else 1 << bit
        assert (weight_checksums([flipped, torch.ones(())]) != before).tolist() == [True, False]


def test_the_odd_one_out_is_named_and_of_two_both() -> None:
    same = torch.tensor([[[5, 6]], [[5, 6]], [[5, 6]]])
    assert weight_mismatch(same, ["a", "b"]) is None
    odd = same.clone()
    odd[1, 0, 1] = 7
    assert weight_mismatch(odd, ["a", "b"]) == ReplicaMismatch((1,), ("b",))
    assert weight_mismatch(odd[:2], ["a", "b"]) == ReplicaMismatch((0, 1), ("b",))
    split = torch.tensor([[[5], [8]], [[5], [8]], [[5], [9]]])  # tensor ranks hold other parts
    assert weight_mismatch(split, ["a"]) == ReplicaMismatch((5,), ("a",))
    sentence = ReplicaMismatch((1,), ("b", "c")).message(3, ["x", "y"])
    assert sentence == "step 3: rank 1 (y) and other replicas differ in b and 1 other weight"


def slowed(rank: int) -> None:
    """Rank 1 takes many times as long, however busy the machine is."""
    if rank == 1:
        forward = DeepSpeedEngine.forward

        def slow(engine: DeepSpeedEngine, *arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            result = forward(engine, *arguments, **named)
            time.sleep(0.05 + 10 * (time.monotonic() - began))
            return result

        DeepSpeedEngine.forward = slow


def test_a_run_names_its_slow_rank(tmp_path: Path) -> None:
    write_text(tmp_path)
    steps = {"training.steps": WINDOW_STEPS + 1, "training.checkpoint_every": 100, "training.evaluate_every": 100}
    config = small_config(tmp_path, steps | {"faults.slow_rank": 3})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=slowed)) == [0, 0]
    assert f"step {WINDOW_STEPS}: rank 1 on " in said(tmp_path, 0)
    (event,) = events_of(read_runs([tmp_path / "run"])[0])
    assert event.wrong
    assert event.text.startswith("rank 1 on ")


def flipping(step: int, victim: int) -> Sabotage:
    """A bit flips in a weight of `victim` right after that step, in the first session."""

    def sabotage(rank: int) -> None:
        update: Callable[..., Any] = Engine.step
        steps = 0

        def flipped(engine: Engine, *arguments: Any) -> Any:
            nonlocal steps
            result = update(engine, *arguments)
            steps += 1
            if rank == victim and steps == step:
                next(iter(engine.replicated_weights().values())).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
            return result

        Engine.step = flipped  # type: ignore[method-assign]

    return sabotage


@pytest.mark.parametrize(("number", "step"), [(0, 3), long(1, 4), long(2, 4)])
def test_a_flipped_bit_ends_the_run_before_it_is_saved_and_the_next_start_undoes_it(
    tmp_path: Path, number: int, step: int
) -> None:
    """At ZeRO 1 and 2 every step renews the weights that the ranks compute with."""
    write_text(tmp_path)
    changes = stage(number) | {"training.checkpoint_every": 2}
    config = small_config(tmp_path, changes)
    assert codes(start_ranks(config, 2, tmp_path, sabotage=flipping(step, 1))) == [2, 2]
    told = said(tmp_path, 0) + said(tmp_path, 1)
    assert "replicas of weights must hold the same bits, but at step 4: ranks 0, 1 (" in told
    assert [without_digits(path.name) for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000002"]
    assert codes(start_ranks(config, 2, tmp_path)) == [0, 0]
    undisturbed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")
    assert [without_digits(event.text) for event in events_of(read_runs([tmp_path / "run"])[0])] == [
        "weights of ranks 0, 1 differed from the other replicas': ended the run",
        "resumed from step-00000002",
    ]


@pytest.mark.parametrize(
    ("policy", "said_to"), [("note", "finished"), ("rollback", "rolled back to"), ("off", "finished")]
)
def test_the_policy_says_what_a_flipped_bit_does(tmp_path: Path, policy: str, said_to: str) -> None:
    write_text(tmp_path)
    changes = {"training.checkpoint_every": 2, "faults.replicas": policy}
    config = small_config(tmp_path, changes)
    assert codes(start_ranks(config, 2, tmp_path, sabotage=flipping(3, 0))) == [0, 0]
    assert said_to in said(tmp_path, 0)
    assert ("and other replicas differ" in said(tmp_path, 0)) is (policy != "off")


@pytest.mark.parametrize(("policy", "code"), [long("stop", 2), ("rollback", 0)])
def test_a_flipped_bit_is_not_saved_when_a_signal_comes_before_the_next_comparison(
    tmp_path: Path, policy: str, code: int
) -> None:
    write_text(tmp_path)
    changes = {"training.checkpoint_every": 2, "faults.replicas": policy}
    config = small_config(tmp_path, changes)

    def flip_and_stop(rank: int) -> None:
        flipping(3, 1)(rank)
        update: Callable[..., Any] = Engine.step
        steps: list[Any] = []

        def signalled(engine: Engine, *arguments: Any) -> Any:
            steps.append(update(engine, *arguments))
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return steps[-1]

        Engine.step = signalled  # type: ignore[method-assign]

    assert codes(start_ranks(config, 2, tmp_path, sabotage=flip_and_stop)) == [code] * 2
    assert "step 3: ranks 0, 1 (" in said(tmp_path, 0) + said(tmp_path, 1)
    assert [without_digits(path.name) for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000002"]
    assert codes(start_ranks(config, 2, tmp_path)) == [0, 0]
    undisturbed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, tmp_path)) == [0, 0]
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "changes", [stage(2) | {"parallel.tensor": 2}, long(stage(3)), long({"engine.embedding": "rows"})]
)
def test_replicas_agree_on_every_mesh(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, changes | {"faults.replicas_every": 1})
    assert codes(start_ranks(config, 4, tmp_path)) == [0] * 4, said(tmp_path, 0)


@pytest.mark.parametrize(
    ("changes", "count", "ranks"), [({}, 2, "ranks 0, 1 ("), long(stage(0) | {"parallel.tensor": 2}, 4, "ranks 1, 3 (")]
)
def test_a_flipped_bit_is_found_between_saves(tmp_path: Path, changes: dict[str, Any], count: int, ranks: str) -> None:
    write_text(tmp_path)
    rare = {"training.checkpoint_every": 100, "training.evaluate_every": 100, "faults.replicas_every": 2}
    config = small_config(tmp_path, changes | rare)
    assert codes(start_ranks(config, count, tmp_path, sabotage=flipping(3, count - 1))) == [2] * count
    assert f"at step 4: {ranks}" in "".join(said(tmp_path, rank) for rank in range(count))
