"""Rotary positions: a rotation, relative, partial, in the input's dtype."""

from __future__ import annotations

import math

import pytest
import torch

from megahead.config.model import RotaryScalingConfig
from megahead.models.layers import apply_rotary, rotary_tables, scale_frequencies


def test_pairs_turn_by_position_times_frequency():
    x_BTHd = torch.zeros(1, 3, 1, 6)
    x_BTHd[..., 0], x_BTHd[..., 1] = 1.0, 1.0
    turned = apply_rotary(x_BTHd, rotary_tables(torch.arange(3), 4, 100.0))[0, 2, 0]
    fast, slow = 2.0, 2.0 / 10  # position 2 times 100^0 and 100^(-1/2)
    expected = [math.cos(fast), math.cos(slow), math.sin(fast), math.sin(slow), 0, 0]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        at = [rotary_tables(torch.tensor([position]), 8, 10000.0) for position in (i, j)]
        return float((apply_rotary(q, at[0]) * apply_rotary(k, at[1])).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_dimensions_beyond_the_tables_pass_through_and_dtype_stays():
    x_BTHd = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    turned = apply_rotary(x_BTHd, rotary_tables(torch.arange(5), 2, 10000.0))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[..., 2:], x_BTHd[..., 2:])
    assert not torch.equal(turned[:, 1:, :, :2], x_BTHd[:, 1:, :, :2])


def test_no_rotated_dimensions_change_nothing():
    x_BTHd = torch.randn(2, 5, 3, 8)
    assert torch.equal(apply_rotary(x_BTHd, rotary_tables(torch.arange(5), 0, 10000.0)), x_BTHd)


def test_each_row_has_its_own_positions():
    x_BTHd = torch.randn(1, 4, 2, 8).expand(2, 4, 2, 8)
    positions_BT = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    turned = apply_rotary(x_BTHd, rotary_tables(positions_BT, 8, 10000.0))
    assert torch.equal(turned[0, :2], turned[1, :2])
    assert torch.equal(turned[1, 2], x_BTHd[1, 2])
    assert not torch.equal(turned[0, 2], turned[1, 2])


def test_linear_scaling_counts_positions_less() -> None:
    plain = rotary_tables(torch.arange(5) / 4, 8, 10000.0)
    scaled = rotary_tables(torch.arange(5), 8, 10000.0, RotaryScalingConfig(kind="linear", factor=4.0))
    torch.testing.assert_close(scaled, plain)


def test_llama3_scaling_slows_down_what_hardly_turns() -> None:
    """Turns in 64 positions: 128, 5, 2.5, 0.5; from 4 on they stay, up to 1 they are 8 times fewer."""
    frequencies = torch.tensor([128.0, 5.0, 2.5, 0.5]) * 2 * math.pi / 64
    scaling = RotaryScalingConfig(kind="llama3", factor=8.0, original_positions=64)
    scaled = scale_frequencies(frequencies, scaling)
    torch.testing.assert_close(scaled / frequencies, torch.tensor([1.0, 1.0, 0.5 + 0.5 / 8, 1 / 8]))
