"""The computed shuffle is a bijection for every size, looks random, and never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megahead.data.samples import FeistelOrder

AROUND_POWERS = [2**power + step for power in range(1, 17) for step in (-1, 0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000) | st.sampled_from(AROUND_POWERS), st.integers(0, 2**64))
@example(1, 0)
@example(2, 0)
@example(3, 0)
def test_every_item_comes_once(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(FeistelOrder(n, seed).take(np.arange(n))), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2**50), st.data())
def test_one_place_equals_many(n: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    order = FeistelOrder(n, 5)
    items = order.take(places)
    assert items.tolist() == [order.take(place) for place in places]
    assert 0 <= items.min() <= items.max() < n
    assert len(set(items.tolist())) == len(set(places))


def test_the_order_is_fixed_for_good() -> None:
    """A change here breaks the resumption of every run ever made: add a new class instead."""
    assert FeistelOrder(10, 0).take(range(10)).tolist() == [5, 0, 4, 8, 9, 7, 3, 2, 1, 6]
    assert FeistelOrder(1000, 7).take([0, 1, 999]).tolist() == [937, 46, 426]
    assert FeistelOrder(10**12, 3).take([0, 10**12 - 1]).tolist() == [398872197488, 471189780905]


@pytest.mark.parametrize("n", [3, 8])
def test_each_item_is_as_likely_at_each_place(n: int) -> None:
    seeds = 600
    table = np.zeros((n, n))
    for seed in range(seeds):
        table[np.arange(n), FeistelOrder(n, seed).take(np.arange(n))] += 1
    expected = seeds / n
    chi_square = ((table - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [5_000, 65_536, 65_537])
def test_neighbours_are_unrelated(n: int) -> None:
    items = FeistelOrder(n, 11).take(np.arange(n)).astype(float)
    bound = 5 / n**0.5
    assert abs(np.corrcoef(np.arange(n), items)[0, 1]) < bound
    for lag in (1, 2, 3, 64, 256):
        assert abs(np.corrcoef(items[:-lag], items[lag:])[0, 1]) < bound
    steps = np.bincount((np.diff(items) % n * 16 / n).astype(int), minlength=16)
    assert ((steps - n / 16) ** 2 / (n / 16)).sum() < 15 + 5 * 30**0.5


def test_seeds_are_unrelated() -> None:
    places = np.arange(4096)
    first, second = (FeistelOrder(4096, seed).take(places).astype(float) for seed in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 64
    assert (first == second).sum() < 10


def test_places_outside_are_refused() -> None:
    order = FeistelOrder(5, 0)
    for place in (-1, 5):
        with pytest.raises(IndexError):
            order.take(place)
    with pytest.raises(ValueError, match="at least one"):
        FeistelOrder(0, 0)
