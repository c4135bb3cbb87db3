"""A corrected bias divides by chances from the text's counts, so targets must be chosen as often as they stand there."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed
from __future__ import annotations

from typing import Any

import pytest

from megahead.config.run import RunConfig
from support.good_settings import assert_told
from support.small_checkpoint import small_config

IDS = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
ENCODER = {"model.size": "bert-tiny", "model.vocab_size": 50, "data.sequence_length": 16, "data.end_token": 2}


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ("masking.strategy: frequency", {"masking": IDS | {"strategy": "frequency"}}),
        ("masking.strategy: informative", {"masking": IDS | {"strategy": "informative"}}),
        ("masking.strategy: hardest", {"masking": IDS | {"strategy": "hardest"}}),
        ("masking.strategy: weights", {"masking": IDS | {"strategy": "weights"}, "data.id_weights": "weights.npy"}),
        ("objective.phrases", {"masking": IDS, "objective.phrases": {"group_samples": 2}}),
    ],
)
def test_it_is_refused_where_masks_prefer_some_ids(other: str, changes: dict[str, Any]) -> None:
    assert_told(
        ENCODER | changes | {"objective.bias": "corrected"},
        f"`objective.bias` must be another with {other}, by which ids are targets more or less often than in the text, but is corrected instead; take paper or once.",
    )


def corrected(objective: dict[str, Any] | None = None, **masking: Any) -> RunConfig:
    shape = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(
        model=shape, data={"end_token": 2}, masking=IDS | masking, objective={"bias": "corrected", **(objective or {})}
    )


@pytest.mark.parametrize(
    "masking", [{}, {"strategy": "span"}, {"rate": 0.4, "count": "bernoulli"}, {"diffusion": True}]
)
def test_it_is_taken_where_masks_prefer_none(masking: dict[str, Any]) -> None:
    assert corrected(**masking).objective.head() == "tied"
