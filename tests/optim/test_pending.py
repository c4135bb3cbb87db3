"""A few nodes stand for every step that did not update a row."""

from __future__ import annotations

import numpy as np
import pytest

from megahead.sharded_embedding.optimizer import (
    LazyUpdates,
    RateHistory,
    convergence_window,
    gauss_nodes,
    lagrange_basis,
)


def test_quadrature_is_exact_for_polynomials_up_to_twice_its_nodes() -> None:
    terms = np.arange(1.0, 121)
    weights = 0.9**terms
    nodes = gauss_nodes(0.9, 4, np.array([120]))
    ((shares,), (nodes,)) = lagrange_basis(nodes, terms) @ weights, nodes
    for power in range(8):
        assert shares @ nodes**power == pytest.approx(weights @ terms**power, rel=1e-9)


def test_short_sums_take_every_term() -> None:
    nodes = gauss_nodes(0.9, 4, np.array([3, 120]))
    assert nodes[0].tolist() == [1, 2, 3, 4]
    assert lagrange_basis(nodes, np.arange(1.0, 4))[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("betas", "window"), [((0.9, 0.95), 203), ((0.9, 0.98), 170), ((0.0, 0.95), 1), ((0.95, 0.9), np.inf)]
)
def test_the_sum_dies_out_within_its_window(betas: tuple[float, float], window: float) -> None:
    assert convergence_window(betas) == window


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.93), (0.9, 0.9)])
def test_nodes_and_all_terms_owe_the_same(betas: tuple[float, float]) -> None:
    history = RateHistory(0.1, 1e-3 * (1.5 + np.cos(np.arange(900) / 300)))
    pending = LazyUpdates(betas, 1e-8, history)
    last_step = np.arange(64, 901)
    few, all_terms = pending.quadrature_updates(last_step), pending.exact_updates(last_step)
    for root in (0.0, 1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2):
        by_nodes, by_terms = ((o[:, 3::2] / (root + o[:, 4::2])).sum(1) for o in (few, all_terms))
        np.testing.assert_allclose(by_nodes, by_terms, rtol=1e-4, atol=1e-9)


def test_what_is_told_step_by_step_is_told_at_once() -> None:
    rates = 1e-3 * np.random.default_rng(0).uniform(1, 1.5, 700)
    grown = LazyUpdates((0.9, 0.98), 1e-8, history := RateHistory(0.1))
    for rate in rates:
        history.extend(np.array([rate]))
        grown.quadrature_updates(np.array([history.steps // 2]))
    given = LazyUpdates((0.9, 0.98), 1e-8, RateHistory(0.1, rates))
    for ours, theirs in zip(*(each.quadrature_updates(np.arange(701)).T for each in (grown, given)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_early_steps_and_jumps_need_every_term() -> None:
    rates = np.full(1000, 1e-3)
    rates[500:] = 1e-4
    pending = LazyUpdates((0.9, 0.95), 1e-8, RateHistory(0.0, rates))
    every_term = pending.needs_exact_updates(np.array([0, 1, 63, 64, 200, 300, 499, 500, 999, 1000]))
    assert every_term.tolist() == [False, True, True, False, False, True, True, False, False, False]
