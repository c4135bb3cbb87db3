"""Where the embedding lies unless a config says it: in rows where they are many and may be, and the banner tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.config.embedding import shards_embedding
from megahead.config.plan import RunPlan
from megahead.estimate import rank_memory
from megahead.train.preflight import describe_run
from support.small_run import small_config

MANY = {"model.vocab_size": 65536}


@pytest.mark.parametrize(
    ("changes", "in_rows", "told"),
    [
        ({}, False, None),
        ({"model.vocab_size": 65535}, False, None),
        (MANY, True, "65,536 rows, 32,768 a rank, updated by adamw at 1 times the learning rate"),
        (MANY | {"engine.embedding": "dense"}, False, None),
        ({"engine.embedding": "rows"}, True, "64 rows, 32 a rank, updated by adamw at 1 times the learning rate"),
        (
            {"optimizer.table.rule": "adagrad"},
            True,
            "64 rows, 32 a rank, updated by adagrad at 1 times the learning rate",
        ),
        ({"objective.name": "vanilla"}, False, None),
        (MANY | {"objective.name": "vanilla"}, False, "dense, because the softmax covers all ids"),
        (MANY | {"objective.vanilla_weight": 0.5}, False, "dense, because the softmax covers all ids"),
        (MANY | {"objective.candidates": "own"}, False, "dense, because candidates have their own table"),
        (MANY | {"optimizer.betas": [0.9, 0.8]}, False, "dense, because the first of optimizer.betas is too large"),
        (MANY | {"optimizer.learning_rate": 20.0}, False, "dense, because weight decay exceeds the weights"),
    ],
    ids=str,
)
def test_auto_takes_rows_where_they_are_many_and_may_be(
    tmp_path: Path, changes: dict[str, Any], in_rows: bool, told: str | None
) -> None:
    plan = RunPlan.of(small_config(tmp_path, changes), 2)
    assert shards_embedding(plan.config) == in_rows
    assert dict(describe_run(plan)).get("embedding") == told
    assert (rank_memory(plan).table > 0) == in_rows
