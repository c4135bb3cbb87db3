"""The short form of `kill_and_resume.py`: a run killed again and again ends as one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs.kill_and_resume import torture

from support.long import long
from support.small_run import offloaded, stage

VARIANTS = {
    "at once": stage(1),
    "in the background": stage(1) | {"training.save_in_background": True},
    "with offload": offloaded(2),
    "in rows": stage(1) | {"engine.embedding": "rows", "training.save_in_background": True},
    "a modernbert": stage(1)
    | {"model.family": "modernbert", "model.num_layers": 2, "model.local_window": 4, "model.hidden_dropout": 0.1}
    | {"masking": {"mask_token": 57, "cls_token": 58, "sep_token": 59}},
    "a gemma": stage(1)
    | {"model.family": "gemma3", "model.num_key_heads": 1, "model.local_window": 4, "model.global_every": 2},
    "a gpt2": stage(1) | {"model.family": "gpt2"},
    "a llama": stage(2) | {"model.family": "llama", "model.num_key_heads": 1, "model.qk_norm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "kills"), [("in rows", 1), *(long(variant, 3) for variant in VARIANTS)])
def test_kills_at_random_moments_leave_no_trace(tmp_path: Path, variant: str, kills: int) -> None:
    assert torture(tmp_path, kills, seed=1, changes=VARIANTS[variant]).kills == kills
