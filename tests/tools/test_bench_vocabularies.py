"""The benchmark of vocabularies steps real engines, dense and in rows, on the same ids, and tells."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from bench_step import _parse_vocabularies, main

import benchmarks.engines as vocabularies
from benchmarks.engines import build_rank_step
from benchmarks.rows import token_rows
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.engine.engine import Engine
from megahead.errors import FieldError
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

CPU = torch.device("cpu")


def bodies(group: Group, config: RunConfig) -> list[list[torch.Tensor]]:
    """Of both kinds, after three steps."""
    engines: list[Engine] = []
    step, rows = Engine.step, token_rows(config, None, count=3)

    def watched(engine: Engine, *arguments: float) -> object:
        engines.append(engine)
        return step(engine, *arguments)

    Engine.step = watched  # type: ignore[method-assign, assignment]
    for kind in ("rows", "dense"):
        take = build_rank_step(vocabularies._config_with_vocabulary(config, 2000, kind, 1), (0, 1, ""), rows, CPU)
        for _ in rows:
            take()
    return [
        [tensor.clone() for name, tensor in engine.tensors() if name.startswith("weight/backbone.blocks")]
        for engine in (engines[0], engines[-1])
    ]


def test_both_kinds_take_the_same_steps(tmp_path: Path) -> None:
    write_text(tmp_path)
    ((rows, dense),) = on_ranks(1, bodies, small_config(tmp_path, {"optimizer.eps": 1e-4}))
    assert max(float((a - b).abs().max()) for a, b in zip(rows, dense, strict=True)) < 1e-5


@pytest.mark.parametrize("ranks", [1, long(2)])
def test_a_line_for_each_vocabulary_and_kind(tmp_path: Path, ranks: int) -> None:
    write_text(tmp_path)
    told = vocabularies.time_vocabularies(small_config(tmp_path), [60, 200_000], ranks, None, 2, CPU)
    assert [(line["embedding"], line["vocabulary"]) for line in told] == [
        *[("rows", 60), ("rows", 200_000)],
        *[("dense", 60), ("dense", 200_000)],
    ]
    assert all(line["wall ratio"] == line["CPU ratio"] == "1.000" for line in told[::2])
    rows, dense = (float(str(told[place]["a step's MiB"])) for place in (1, 3))
    assert dense - rows > 0.9 * 200_000 * 32 * 4 / 2**20  # gradients of all rows


def test_sizes_are_numbers_and_ranks_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _parse_vocabularies("32768, 65536") == [32768, 65536]
    assert _parse_vocabularies(None) == []
    with pytest.raises(FieldError, match="separated by commas"):
        _parse_vocabularies("32k")
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--preset", "bert-tiny", "--ranks", "2"])
    with pytest.raises(FieldError, match="`--ranks` must be 1 without --vocabulary"):
        main()
