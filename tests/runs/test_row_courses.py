"""Random courses: meshes, stages, accumulation and both kinds of embedding in turn, with a bad step in between, end
where one rank with a dense embedding does."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.reading import open_checkpoint
from support.bad_rows import BAD, run_with
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import small_config, stage, write_text


def session(chance: random.Random) -> tuple[int, dict[str, Any]]:
    """Ranks, and how they divide the work; two micro-batches a rank at least."""
    ranks = chance.choice([1, 2, 4])
    tensor = chance.choice([size for size in (1, 2) if ranks % size == 0])
    settings = {
        "parallel.tensor": tensor,
        "batch.micro_size": chance.choice([1, 2] if ranks // tensor < 4 else [1]),
        "data.prefetch": chance.choice([0, 2]),
    }
    return ranks, settings | stage(chance.randrange(4))


@pytest.mark.parametrize("seed", [long(0), 1, long(2)])
def test_a_random_course_ends_where_one_dense_rank_does(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    write_text(tmp_path)
    common = {
        "faults.bad_step": chance.choice(["skip", "rollback"]),
        "model.vocab_size": chance.choice([60, 1_000, 5_000]),
        "data.sequence_length": 6,  # few tokens a step, so that rows are stale
        "objective.group_samples": 4,
        "schedule.name": "constant",
        "training.checkpoint_every": 2,
        "optimizer.eps": 1e-4,
    }
    drawn, kinds = [], chance.sample(["rows", "rows", "dense"], 3)
    for steps, kind in zip((2, 5, 7), kinds, strict=True):
        ranks, settings = session(chance)
        settings |= {"engine.embedding": kind}
        drawn.append((ranks, settings))
        config = small_config(tmp_path, common | settings | {"training.steps": steps})
        assert on_ranks(ranks, run_with, config, math.nan) == ["finished"] * ranks, drawn
    straight = common | {"training.steps": 7, "engine.embedding": "dense", "output_dir": str(tmp_path / "straight")}
    assert on_ranks(1, run_with, small_config(tmp_path, straight), math.nan, (BAD,)) == ["finished"]
    ours, reference = (open_checkpoint(tmp_path / name) for name in ("run", "straight"))
    for name in reference.tensors:
        difference = float((ours.read(name).double() - reference.read(name).double()).abs().max())
        assert difference < 1e-5, (name, drawn)
