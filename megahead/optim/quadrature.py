"""Gauss quadrature of sums with geometric weights: a few nodes stand for hundreds of terms.

For a smooth f and weights near ratio^j, sum over j = 1 .. n of w_j f(j) is the sum over a few nodes x of W_x f(x). The
nodes are those of the measure ratio^j (a discrete Laguerre); the weights integrate the actual w_j, so that slopes in
these cost nothing.
"""

from __future__ import annotations

import numpy as np

from megahead.optim.rates import Floats, Ints


def gauss_nodes(ratio: float, count: int, terms_G: Ints) -> Floats:
    """[G, count]: the nodes of the measure ratio^j on j = 1 .. terms, increasing; for each of G numbers of terms.

    The first `count` places where there are no more terms than that. By Golub & Welsch 1969: eigenvalues.
    """
    nodes_GN = np.tile(np.arange(1.0, count + 1), (len(terms_G), 1))
    more = terms_G > count
    nodes_GN[more] = np.linalg.eigvalsh(_recurrence(ratio, count, terms_G[more]))
    return nodes_GN


def _recurrence(ratio: float, count: int, terms_G: Ints) -> Floats:
    """[G, count, count]: the matrices of the recurrence of the measures' orthogonal polynomials, three diagonals."""
    places_J = np.arange(1.0, np.max(terms_G, initial=1) + 1)
    weights_GJ = ratio**places_J * (places_J <= terms_G[:, None])
    weights_GJ /= weights_GJ.sum(1, keepdims=True)
    matrix_GNN = np.zeros((len(terms_G), count, count))
    before_GJ, polynomial_GJ = np.zeros_like(weights_GJ), np.ones_like(weights_GJ)
    norm_before_G = np.full(len(terms_G), np.inf)
    for k in range(count):
        norm_G = np.sum(weights_GJ * polynomial_GJ**2, 1)
        center_G = np.sum(weights_GJ * places_J * polynomial_GJ**2, 1) / norm_G
        beside_G = norm_G / norm_before_G
        matrix_GNN[:, k, k - 1] = matrix_GNN[:, k - 1, k] = np.sqrt(beside_G)  # 0 beside the first
        matrix_GNN[:, k, k] = center_G
        following_GJ = (places_J - center_G[:, None]) * polynomial_GJ - beside_G[:, None] * before_GJ
        before_GJ, polynomial_GJ, norm_before_G = polynomial_GJ, following_GJ, norm_G
    return matrix_GNN


def lagrange_basis(nodes_GN: Floats, places_J: Floats) -> Floats:
    """[G, N, J]: the polynomial that is 1 at one node and 0 at the others, for each node, at the places."""
    apart_GNJ, basis = places_J - nodes_GN[:, :, None], []
    for k, node_G1 in enumerate(nodes_GN.T[:, :, None]):
        there_G1 = np.delete(node_G1 - nodes_GN, k, 1).prod(1, keepdims=True)
        basis.append(np.delete(apart_GNJ, k, 1).prod(1) / there_G1)
    return np.stack(basis, 1)
