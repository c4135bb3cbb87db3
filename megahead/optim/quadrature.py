"""Gauss quadrature of sums with geometric weights: a few nodes stand for hundreds of terms.

For a smooth f and weights near ratio^j, sum over j = 1 .. n of w_j f(j) is the sum over a few nodes x of W_x f(x). The
nodes are those of the measure ratio^j (a discrete Laguerre); the weights integrate the actual w_j, so that slopes in
these cost nothing.
"""

from __future__ import annotations

import numpy as np

from megahead.optim.rates import Floats


def gauss_nodes(ratio: float, count: int, terms: int) -> Floats:
    """The `count` nodes of the measure ratio^j on j = 1 .. `terms`, increasing; every j where there are no more.

    By Golub & Welsch 1969: eigenvalues of the matrix of the recurrence of orthogonal polynomials.
    """
    places = np.arange(1, terms + 1, dtype=np.float64)
    if terms <= count:
        return places
    weights = ratio**places / np.sum(ratio**places)
    diagonal, beside = np.zeros(count), np.zeros(count)
    before, polynomial, norm_before = np.zeros(terms), np.ones(terms), 1.0
    for k in range(count):
        norm = np.sum(weights * polynomial**2)
        diagonal[k] = np.sum(weights * places * polynomial**2) / norm
        beside[k] = norm / norm_before if k else 0.0
        before, polynomial = polynomial, (places - diagonal[k]) * polynomial - beside[k] * before
        norm_before = norm
    roots = np.sqrt(beside[1:])
    return np.linalg.eigvalsh(np.diag(diagonal) + np.diag(roots, 1) + np.diag(roots, -1))


def lagrange_basis(nodes: Floats, places: Floats) -> Floats:
    """[nodes, places]: the polynomial that is 1 at one node and 0 at the others, for each node, at `places`."""
    basis = np.ones((len(nodes), len(places)))
    for k, node in enumerate(nodes):
        for other in np.delete(nodes, k):
            basis[k] *= (places - other) / (node - other)
    return basis
