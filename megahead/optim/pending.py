"""What AdamW did to a weight while it had no gradient, in closed form (Loshchilov & Hutter 2019, arXiv 1711.05101).

A weight p with moments m, v after step s has after step t = s + n, without gradients in between,

    m_t = b1^n m        v_t = b2^n v        p_t = W(s, t) p - m * sum_{j=1..n} A_j / (sqrt(v) + E_j)
    A_j = W(s+j, t) lr_{s+j} sqrt(1 - b2^{s+j}) / (1 - b1^{s+j}) (b1 / sqrt b2)^j
    E_j = eps sqrt(1 - b2^{s+j}) b2^{-j/2}

where W is what weight decay leaves. b1 < sqrt(b2) makes the sum die out within a window of steps. Four nodes of Gauss
quadrature stand for it, which is exact for terms that change smoothly with j. Where they do not, all terms are added:
near the first step, where Adam's bias correction is singular, and where the learning rate jumped.

`touched` is s, the step of a row's last update; 0 if there was none, so that only weight decay is owed to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megahead.optim.quadrature import gauss_nodes, lagrange_basis
from megahead.optim.rates import Floats, Ints, PerStep, RateHistory

NODES = 4
EARLY_STEPS = 64
"""Steps whose terms are added one by one (measured without warm-up: four nodes alone err by 7e-4 there)."""
_NEGLIGIBLE = 1e-7
LONGEST_WINDOW = 1024
"""Most terms that are summed. No run comes near: its config refuses betas whose window exceeds 798."""


def window_of(betas: tuple[float, float]) -> float:
    """Terms until the sum has died out to 1e-7; inf where it does not."""
    if betas[0] == 0:
        return 1
    ratio = betas[0] / math.sqrt(betas[1]) if betas[1] else math.inf
    return math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio)) if ratio < 1 else math.inf


@dataclass(frozen=True)
class Owed:
    """What later steps would have done to rows last updated at each of S steps, as K summands (float64)."""

    kept_S: Floats
    """W(s, t), what weight decay leaves."""
    weights_SK: Floats
    """The weight of each node: the sum over terms j of A_j times the node's Lagrange polynomial at j; or A_j itself."""
    offsets_SK: Floats
    """E at the nodes, or at every term."""
    first_S: Floats
    """b1^n, the factor of the first moment."""
    second_S: Floats
    """b2^n, that of the second."""

    def columns(self) -> Floats:
        """[S, 3 + 2 K]: W, b1^n, b2^n, then A and E in turn."""
        in_turn = np.stack([self.weights_SK, self.offsets_SK], 2)
        in_turn = in_turn.reshape(len(self.kept_S), 2 * self.weights_SK.shape[1])
        return np.concatenate([np.stack([self.kept_S, self.first_S, self.second_S], 1), in_turn], 1)


class PendingUpdates:
    """The updates that stale rows wait for, from a history of learning rates that grows as steps are applied."""

    def __init__(self, betas: tuple[float, float], eps: float, history: RateHistory) -> None:
        self._betas, self._eps, self._history = betas, eps, history
        self._window = int(min(window_of(betas), LONGEST_WINDOW))
        self._ratio = betas[0] / math.sqrt(betas[1]) if betas[0] else 0.0
        self._powers = self._ratio ** np.arange(1, self._window + 1)
        self._nodes, self._basis = _quadrature(self._ratio, self._window)
        self._corrected = PerStep(0.0)  # rates with Adam's bias correction
        self._settled = PerStep(np.zeros(NODES))  # sums over the whole window after a step

    def _extend(self) -> None:
        """Continues both `PerStep`s to the history's last step: some 0.1 ms a step, whatever the number of rows."""
        b1, b2 = self._betas
        steps = np.arange(len(self._corrected), self._history.steps + 1)
        self._corrected.extend(self._history.rate(steps) * np.sqrt(1 - b2**steps) / (1 - b1**steps))
        window_passed = np.arange(len(self._settled), self._history.steps - self._window + 1)
        for part in np.array_split(window_passed, len(window_passed) // 4096 + 1):
            self._settled.extend(self._at_nodes(part, np.full(len(part), self._window)))

    def needs_every_term(self, touched: Ints) -> NDArray[np.bool_]:
        """Whether all terms have to be added for rows last updated at these steps: quadrature would not be exact."""
        until = np.minimum(touched + self._window, self._history.steps)
        jumps = self._history.jumps(np.minimum(touched + 1, until), until)
        has_terms = (touched > 0) & (touched < self._history.steps)
        answer: NDArray[np.bool_] = has_terms & ((touched < EARLY_STEPS) | (jumps > 0))
        return answer

    def owed(self, touched: Ints) -> Owed:
        """By quadrature; for steps of which `needs_every_term` is false."""
        self._extend()
        gaps = np.minimum(self._history.steps - touched, self._window)
        weights, in_window = np.empty((len(touched), NODES)), gaps < self._window
        weights[in_window] = self._at_nodes(touched[in_window], gaps[in_window])
        weights[~in_window] = self._settled.values[touched[~in_window]]
        return self._with(touched, weights, self._offsets(touched[:, None], self._nodes[gaps]))

    def owed_term_by_term(self, touched: Ints) -> Owed:
        """By adding every term; for any steps."""
        self._extend()
        now = self._history.steps
        longest = min(self._window, int(np.max(now - touched, initial=1)))
        terms = np.arange(1, longest + 1)
        steps = np.minimum(touched[:, None] + terms, now)
        live = terms <= (now - touched)[:, None]
        weights = live * self._corrected.values[steps] / self._history.kept(touched[:, None], steps)
        return self._with(touched, weights * self._powers[:longest], self._offsets(touched[:, None], terms))

    def _with(self, touched: Ints, weights: Floats, offsets: Floats) -> Owed:
        now = self._history.steps
        kept, gaps, (b1, b2) = self._history.kept(touched, now), (now - touched).astype(np.float64), self._betas
        return Owed(kept, kept[:, None] * weights, offsets, b1**gaps, b2**gaps)

    def _at_nodes(self, touched: Ints, gaps: Ints) -> Floats:
        """[S, NODES]: the nodes' weights over the `gaps` steps after each of `touched`, but for the decay up to now."""
        steps = np.minimum(touched[:, None] + np.arange(1, self._window + 1), self._history.steps)
        terms = self._corrected.values[steps] / self._history.kept(touched[:, None], steps) * self._powers
        sums: Floats = np.einsum("sj,snj->sn", terms, self._basis[gaps])
        return sums

    def _offsets(self, touched_S1: Ints, j: Floats | Ints) -> Floats:
        b2 = self._betas[1]
        offsets: Floats = self._eps * np.sqrt(1 - b2 ** (touched_S1 + j)) * b2 ** (-j / 2)
        return offsets


def _quadrature(ratio: float, window: int) -> tuple[Floats, Floats]:
    """For each gap up to `window`: its nodes [gap, NODES], and the weight of each term there [gap, NODES, window]."""
    gaps, j = np.arange(window + 1), np.arange(1.0, window + 1)
    nodes = gauss_nodes(ratio, NODES, gaps)
    return nodes, lagrange_basis(nodes, j) * (j <= gaps[:, None])[:, None]
