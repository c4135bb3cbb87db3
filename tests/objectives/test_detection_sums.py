"""Replaced-token detection: its loss and counts by their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from megahead.config.auxiliaries import ReplacedTokensConfig
from megahead.objectives.replaced_tokens import detection_sums


def test_loss_and_gradient_are_those_of_a_coin_with_the_models_odds() -> None:
    logits_P = torch.tensor([3.0, -1.0, 0.2, -4.0, 2.0], dtype=torch.float64, requires_grad=True)
    replaced_P = torch.tensor([True, True, False, False, True])
    sums = detection_sums(logits_P, replaced_P)
    chance_P = 1 / (1 + torch.exp(-logits_P.detach()))
    right_P = torch.where(replaced_P, chance_P, 1 - chance_P)
    assert sums["loss"].item() == pytest.approx(-right_P.log().sum().item())
    sums["loss"].backward()
    assert logits_P.grad is not None
    assert logits_P.grad.tolist() == pytest.approx((chance_P - replaced_P.double()).tolist())
    assert {name: int(sums[name]) for name in ("classified", "replaced", "found", "kept")} == {
        "classified": 5,
        "replaced": 3,
        "found": 2,
        "kept": 1,
    }


def test_half_precision_is_judged_in_single() -> None:
    sums = detection_sums(torch.tensor([20.0], dtype=torch.bfloat16), torch.tensor([False]))
    assert sums["loss"].dtype == torch.float32
    assert sums["loss"].item() == pytest.approx(20.0)


def test_shares_are_of_the_replaced_and_of_the_others() -> None:
    settings, names = ReplacedTokensConfig(), ("loss", "classified", "replaced", "found", "kept")
    result = settings.means(dict(zip(names, (10.0, 40.0, 10.0, 7.0, 27.0), strict=True)))
    assert result == {"loss": 0.25, "replaced": 0.25, "found": 0.7, "kept": 0.9}
    assert set(settings.means(dict.fromkeys(names, 0.0)).values()) == {0.0}


def test_no_token_gives_no_loss_but_a_gradient() -> None:
    logits_P = torch.zeros(0, requires_grad=True)
    sums = detection_sums(logits_P, torch.zeros(0, dtype=torch.bool))
    sums["loss"].backward()
    assert sums["loss"].item() == 0.0
    assert math.isfinite(sums["loss"].item())
    assert logits_P.grad is not None
