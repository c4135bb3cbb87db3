"""What the first lines of a run say of phases, and of weights that move otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.config.plan import RunPlan
from megahead.train.describe import describe_run
from support.small_run import small_config


def described(folder: Path, **changes: Any) -> dict[str, str]:
    return dict(describe_run(RunPlan.of(small_config(folder, changes))))


def test_an_ordinary_run_says_nothing_of_them(tmp_path: Path) -> None:
    assert not {"phases", "optimizer"} & described(tmp_path).keys()


@pytest.mark.parametrize(("tied", "head"), [(False, 64 * 32 + 64), (True, 64)])
def test_a_run_in_phases_tells_their_steps_and_counts_its_head(tmp_path: Path, tied: bool, head: int) -> None:
    lines = described(tmp_path, **{"objective.schedule": {"vanilla_share": 0.5}, "objective.tied": tied})
    kind = "tied" if tied else "untied"
    assert lines["phases"] == f"headless for 3 steps, then vanilla ({kind}, with a bias) for 3 steps"
    assert lines["objective"].startswith("headless, ")
    assert lines["parameters"].endswith(f" {head:,} head)")


def test_own_rates_are_told(tmp_path: Path) -> None:
    muon = {"optimizer.name": "muon", "optimizer.muon": {"learning_rate_ratio": 0.5}}
    rated = {"optimizer.table": {"learning_rate_ratio": 8}}
    told = "muon for the matrices of blocks at 0.5 times the learning rate, adamw for the rest"
    assert described(tmp_path, **muon)["optimizer"] == told
    table = described(tmp_path, **rated, **{"objective.name": "vanilla"})["optimizer"]
    assert table == "8 times the learning rate for embedding and head"
    rows = described(tmp_path, **rated, **{"engine.embedding": "rows"})
    assert "optimizer" not in rows
    assert rows["embedding"].endswith("updated by adamw at 8 times the learning rate")


def test_the_temperature_of_another_score_is_told_also_where_it_is_the_default(tmp_path: Path) -> None:
    """At which a cosine can hardly prefer a token."""
    assert "temperature" not in described(tmp_path)["objective"]
    told = described(tmp_path, **{"objective.score": "cosine"})["objective"]
    assert told.endswith("scored by cosine, temperature 1")


@pytest.mark.parametrize(
    ("masking", "told"),
    [
        ({"strategy": "frequency"}, "15% of the tokens masked, by frequency"),
        ({"masks_from_layer": 2}, "15% of the tokens masked, mask tokens from layer 2 on"),
        ({"mask_decoder_layers": 1}, "15% of the tokens masked, mask tokens in a decoder of 1 layer"),
        ({"dropping": {"from_layer": 1}}, "15% of the tokens masked, 50% of the tokens in layers 1 to 2, by hardest"),
        ({"dropping": {"from_layer": 2, "keep_share": 0.3}}, "masked, 30% of the tokens in layer 2, by hardest"),
    ],
    ids=str,
)
def test_masks_and_what_layers_compute_of_them_are_told(tmp_path: Path, masking: dict[str, Any], told: str) -> None:
    ids = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
    model = {"family": "bert", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 60}
    assert described(tmp_path, model=model, masking=ids | masking)["objective"].endswith(told)
