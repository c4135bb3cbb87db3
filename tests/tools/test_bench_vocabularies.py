"""The benchmark of vocabularies steps real engines, dense and in rows, on the same ids, and tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench_step import _vocabularies

import benchmarks.vocabularies as vocabularies
from benchmarks.tokens import token_rows
from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.errors import FieldError
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

CPU = torch.device("cpu")


def weights(stepper: vocabularies.Stepper) -> list[torch.Tensor]:
    return [tensor.clone() for name, tensor in stepper.engine.tensors() if name.startswith("weight/backbone.blocks")]


def apart(group: Group, config: RunConfig) -> float:
    """How far the bodies of both kinds are from each other after three steps."""
    steppers = [vocabularies.Stepper(vocabularies._under(config, 2000, kind), CPU) for kind in ("rows", "dense")]
    for rows in token_rows(config, None, count=3):
        assert min(stepper.step(rows) for stepper in steppers) > 0
    return max(float((a - b).abs().max()) for a, b in zip(*map(weights, steppers), strict=True))


def test_both_kinds_take_the_same_steps(tmp_path: Path) -> None:
    write_text(tmp_path)
    (distance,) = on_ranks(1, apart, small_config(tmp_path, {"optimizer.eps": 1e-4}))
    assert distance < 1e-5


def lines(group: Group, config: RunConfig) -> list[dict[str, Any]]:
    return vocabularies.grow(config, [60, 2000], None, 2, CPU)


def test_a_line_for_each_vocabulary_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    monkeypatch.setattr(vocabularies, "_in_a_fresh_process", lambda work, *arguments: 7.0)
    (told,) = on_ranks(1, lines, small_config(tmp_path))
    assert [(line["embedding"], line["vocabulary"]) for line in told] == [
        *[("rows", 60), ("rows", 2000)],
        *[("dense", 60), ("dense", 2000)],
    ]
    assert [line["to the first"] == "1.00" for line in told[::2]] == [True, True]
    assert {line["a step's MiB"] for line in told} == {7}


def test_sizes_are_numbers() -> None:
    assert _vocabularies("32768, 65536") == [32768, 65536]
    assert _vocabularies(None) == []
    with pytest.raises(FieldError, match="separated by commas"):
        _vocabularies("32k")
