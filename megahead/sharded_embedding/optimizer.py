"""Lazy optimizer updates of embedding rows: a row's missed updates are applied when it is next fetched."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megahead.config.training import OptimizerConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_JUMP_FACTOR = 2.0
"""A learning rate jump is a change by more than this factor between consecutive steps."""


class StepSeries:
    """A growable array with one entry, a number or a row, for each step. `first` is the entry of step 0."""

    def __init__(self, first: Any) -> None:
        self._buffer = np.array([first])
        self._length = 1

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> NDArray[Any]:
        """All entries, as a view."""
        return self._buffer[: self._length]

    def extend(self, values: NDArray[Any]) -> None:
        """Appends `values`, one for each further step."""
        needed = self._length + len(values)
        if needed > len(self._buffer):
            more = max(needed, 2 * len(self._buffer)) - len(self._buffer)
            self._buffer = np.concatenate([self._buffer, np.zeros((more, *self._buffer.shape[1:]), self._buffer.dtype)])
        self._buffer[self._length : needed] = values
        self._length = needed


class RateHistory:
    """Learning rates and weight decay of all applied steps, in float64. Steps are numbered from 1."""

    def __init__(self, weight_decay: float, rates: Sequence[float] | Floats = ()) -> None:
        self._weight_decay = weight_decay
        self._rates, self._log_decay, self._jumps = StepSeries(0.0), StepSeries(0.0), StepSeries(0)
        self.extend(np.asarray(rates, np.float64))

    @property
    def steps(self) -> int:
        """The number of applied steps."""
        return len(self._rates) - 1

    @property
    def rates(self) -> Floats:
        """[steps]: the learning rate of each step."""
        return self._rates.values[1:].copy()

    def extend(self, rates: Floats) -> None:
        """Appends steps with these rates."""
        before = np.concatenate([self._rates.values[-1:], rates[:-1]])[: len(rates)]
        decay = (1 - rates * self._weight_decay).astype(np.float32).astype(np.float64)  # rounded as in torch
        is_jump = np.maximum(rates, before) > _JUMP_FACTOR * np.minimum(rates, before)
        _accumulate(self._jumps, is_jump)
        _accumulate(self._log_decay, np.log(decay))
        self._rates.extend(rates)

    def rate(self, steps: Any) -> Any:
        """The learning rates of `steps`."""
        return self._rates.values[steps]

    def decay_factor(self, since: Any, until: Any) -> Any:
        """The factor of weight decay between two steps: prod of 1 - rate * decay over since + 1 .. until."""
        log_decay = self._log_decay.values
        return np.exp(log_decay[until] - log_decay[since])

    def jumps(self, since: Any, until: Any) -> Any:
        """The number of learning rate jumps over since + 1 .. until, each relative to the previous step."""
        jumps = self._jumps.values
        return jumps[until] - jumps[since]


def _accumulate(sums: StepSeries, values: NDArray[Any]) -> None:
    """Extends a cumulative sum. The rounding does not depend on how many values are added at once."""
    sums.extend(np.cumsum(np.concatenate([sums.values[-1:], values]))[1:])


# Gauss quadrature of sums with geometric weights: a few nodes replace hundreds of terms.
#
# For a smooth f and weights near ratio^j, sum over j = 1 .. n of w_j f(j) is the sum over a few nodes x of W_x f(x).
# The nodes are those of the measure ratio^j (discrete Laguerre polynomials); the weights W_x integrate the actual w_j,
# so that slowly varying w_j lose no accuracy.


def gauss_nodes(ratio: float, count: int, terms_G: Ints) -> Floats:
    """[G, count]: the nodes of the measure ratio^j on j = 1 .. terms, increasing; for each of G numbers of terms.

    With at most `count` terms the nodes are 1 .. `count`. Eigenvalues of the Jacobi matrix (Golub & Welsch 1969).
    """
    nodes_GN = np.tile(np.arange(1.0, count + 1), (len(terms_G), 1))
    needs_quadrature_G = terms_G > count
    nodes_GN[needs_quadrature_G] = np.linalg.eigvalsh(_jacobi_matrices(ratio, count, terms_G[needs_quadrature_G]))
    return nodes_GN


def _jacobi_matrices(ratio: float, count: int, terms_G: Ints) -> Floats:
    """[G, count, count]: the tridiagonal Jacobi matrices of the measures' orthogonal polynomials."""
    x_J = np.arange(1.0, np.max(terms_G, initial=1) + 1)
    weights_GJ = ratio**x_J * (x_J <= terms_G[:, None])
    weights_GJ /= weights_GJ.sum(1, keepdims=True)
    matrix_GNN = np.zeros((len(terms_G), count, count))
    previous_GJ, polynomial_GJ = np.zeros_like(weights_GJ), np.ones_like(weights_GJ)
    previous_norm_G = np.full(len(terms_G), np.inf)
    for k in range(count):
        norm_G = np.sum(weights_GJ * polynomial_GJ**2, 1)
        alpha_G = np.sum(weights_GJ * x_J * polynomial_GJ**2, 1) / norm_G
        beta_G = norm_G / previous_norm_G
        matrix_GNN[:, k, k - 1] = matrix_GNN[:, k - 1, k] = np.sqrt(beta_G)  # 0 for k = 0
        matrix_GNN[:, k, k] = alpha_G
        next_GJ = (x_J - alpha_G[:, None]) * polynomial_GJ - beta_G[:, None] * previous_GJ
        previous_GJ, polynomial_GJ, previous_norm_G = polynomial_GJ, next_GJ, norm_G
    return matrix_GNN


def lagrange_basis(nodes_GN: Floats, x_J: Floats) -> Floats:
    """[G, N, J]: the Lagrange polynomial of each node, evaluated at `x_J`."""
    difference_GNJ, basis = x_J - nodes_GN[:, :, None], []
    for k, node_G1 in enumerate(nodes_GN.T[:, :, None]):
        denominator_G1 = np.delete(node_G1 - nodes_GN, k, 1).prod(1, keepdims=True)
        basis.append(np.delete(difference_GNJ, k, 1).prod(1) / denominator_G1)
    return np.stack(basis, 1)


# AdamW's updates of a weight without gradients, in closed form (Loshchilov & Hutter 2019, arXiv 1711.05101).
#
# A weight p with moments m, v after step s has after step t = s + n, without gradients in between,
#
#     m_t = b1^n m        v_t = b2^n v        p_t = W(s, t) p - m * sum_{j=1..n} A_j / (sqrt(v) + E_j)
#     A_j = W(s+j, t) lr_{s+j} sqrt(1 - b2^{s+j}) / (1 - b1^{s+j}) (b1 / sqrt b2)^j
#     E_j = eps sqrt(1 - b2^{s+j}) b2^{-j/2}
#
# where W is the factor of weight decay. With b1 < sqrt(b2) the sum converges within a window of steps. Gauss quadrature
# is accurate for terms that are smooth in j: with four nodes for b1 <= b2^1.5, with eight up to b1 = b2. Where they are
# not, all terms are added: near the first step, where Adam's bias correction is singular, and after a jump of the
# learning rate.
#
# `last_step` is s, the step of a row's last update; 0 if there was none, so that only weight decay is missing.


EARLY_STEPS = 64
"""Steps whose terms are added exactly (the quadrature error there, measured without warm-up, is 7e-4)."""
_TOLERANCE = 1e-7
MAX_WINDOW = 1024
"""Largest number of terms. No run reaches it: a config is invalid if its betas need a window above 798."""


def convergence_window(betas: tuple[float, float]) -> float:
    """The number of terms until the sum has converged to 1e-7; inf if it does not converge."""
    if betas[0] == 0:
        return 1
    ratio = betas[0] / math.sqrt(betas[1]) if betas[1] else math.inf
    return math.ceil(math.log(_TOLERANCE) / math.log(ratio)) if ratio < 1 else math.inf


def num_nodes(betas: tuple[float, float]) -> int:
    """The number of nodes for a relative error of at most 5e-5 (measured); the first beta is at most the second."""
    return 4 if betas[0] <= betas[1] ** 1.5 else 8


class LazyUpdates:
    """The missed updates of stale rows (which the last steps did not update), from a growing history of learning rates.

    They are the same for all rows last updated at one step. For S such steps they are an array [S, 3 + 2 K], float64:
    the factors W, b1^n and b2^n, then K pairs (weight, E). A pair is a term j, with the weight A_j, or a node, with the
    sum over j of A_j times the node's Lagrange polynomial at j as weight.
    """

    def __init__(self, betas: tuple[float, float], eps: float, history: RateHistory) -> None:
        self._betas, self._eps, self._history = betas, eps, history
        self._window, self._num_nodes = int(min(convergence_window(betas), MAX_WINDOW)), num_nodes(betas)
        self._ratio = betas[0] / math.sqrt(betas[1]) if betas[0] else 0.0
        self._powers = self._ratio ** np.arange(1, self._window + 1)
        num_missed, j = np.arange(self._window + 1), np.arange(1.0, self._window + 1)
        self._nodes = gauss_nodes(self._ratio, self._num_nodes, num_missed)  # [num_missed, num_nodes]
        # [num_missed, num_nodes, window]
        self._basis = lagrange_basis(self._nodes, j) * (j <= num_missed[:, None])[:, None]
        self._corrected = StepSeries(0.0)  # learning rates with Adam's bias correction
        self._full_window_sums = StepSeries(np.zeros(self._num_nodes))  # sums over the whole window after a step

    def _extend(self) -> None:
        """Extends both `StepSeries` to the history's last step: some 0.1 ms a step for any number of rows."""
        b1, b2 = self._betas
        steps = np.arange(len(self._corrected), self._history.steps + 1)
        self._corrected.extend(self._history.rate(steps) * np.sqrt(1 - b2**steps) / (1 - b1**steps))
        full_steps = np.arange(len(self._full_window_sums), self._history.steps - self._window + 1)
        for part in np.array_split(full_steps, len(full_steps) // 4096 + 1):
            self._full_window_sums.extend(self._node_weights(part, np.full(len(part), self._window)))

    def needs_exact_updates(self, last_step: Ints) -> NDArray[np.bool_]:
        """Whether quadrature is inaccurate for rows last updated at these steps, so that all terms must be added."""
        until = np.minimum(last_step + self._window, self._history.steps)
        jumps = self._history.jumps(np.minimum(last_step + 1, until), until)
        has_terms = (last_step > 0) & (last_step < self._history.steps)
        needs_exact: NDArray[np.bool_] = has_terms & ((last_step < EARLY_STEPS) | (jumps > 0))
        return needs_exact

    def quadrature_updates(self, last_step: Ints) -> Floats:
        """The missed updates by quadrature, for steps without `needs_exact_updates`."""
        self._extend()
        num_missed = np.minimum(self._history.steps - last_step, self._window)
        weights, in_window = np.empty((len(last_step), self._num_nodes)), num_missed < self._window
        weights[in_window] = self._node_weights(last_step[in_window], num_missed[in_window])
        weights[~in_window] = self._full_window_sums.values[last_step[~in_window]]
        return self._columns(last_step, weights, self._offsets(last_step[:, None], self._nodes[num_missed]))

    def exact_updates(self, last_step: Ints) -> Floats:
        """The missed updates as sums of all terms, for any steps."""
        self._extend()
        current_step = self._history.steps
        num_terms = min(self._window, int(np.max(current_step - last_step, initial=1)))
        terms = np.arange(1, num_terms + 1)
        steps = np.minimum(last_step[:, None] + terms, current_step)
        is_missed = terms <= (current_step - last_step)[:, None]
        weights = is_missed * self._corrected.values[steps] / self._history.decay_factor(last_step[:, None], steps)
        return self._columns(last_step, weights * self._powers[:num_terms], self._offsets(last_step[:, None], terms))

    def _columns(self, last_step_S: Ints, weights_SK: Floats, offsets_SK: Floats) -> Floats:
        """[S, 3 + 2 K]: the missed updates with these summands."""
        current_step, (b1, b2) = self._history.steps, self._betas
        decay_S = self._history.decay_factor(last_step_S, current_step)
        num_missed_S = (current_step - last_step_S).astype(np.float64)
        summands = np.stack([decay_S[:, None] * weights_SK, offsets_SK], 2)
        summands = summands.reshape(len(decay_S), 2 * weights_SK.shape[1])
        return np.concatenate([np.stack([decay_S, b1**num_missed_S, b2**num_missed_S], 1), summands], 1)

    def _node_weights(self, last_step: Ints, num_missed: Ints) -> Floats:
        """[S, num_nodes]: the nodes' weights over the `num_missed` steps after `last_step`, without W(s, t)."""
        steps = np.minimum(last_step[:, None] + np.arange(1, self._window + 1), self._history.steps)
        terms = self._corrected.values[steps] / self._history.decay_factor(last_step[:, None], steps) * self._powers
        sums: Floats = np.einsum("sj,snj->sn", terms, self._basis[num_missed])
        return sums

    def _offsets(self, last_step_S1: Ints, j: Floats | Ints) -> Floats:
        """E of the terms or nodes `j`."""
        b2 = self._betas[1]
        offsets: Floats = self._eps * np.sqrt(1 - b2 ** (last_step_S1 + j)) * b2 ** (-j / 2)
        return offsets


# Row optimizers: a step updates only rows with a gradient.
#
# A row is stale if the last steps did not update it, because no batch used it. Its missed updates (momentum and weight
# decay) are applied when it is next fetched. `last_step`: the step of a row's last update.
#
# `Rows` are the tensors of n rows: `weight` [n, D] and its moments, per element [n, D] or per row [n, 1].


Rows = Mapping[str, Tensor]
Moments = Mapping[str, Literal["element", "row"]]
WEIGHT = "weight"
LAST_STEP, LEARNING_RATES = "touched", "rates"
"""Kinds of tensors in a checkpoint, beside the weights and moments."""


class RowOptimizer(ABC):
    """The optimizer of a rank's rows. Updates them in place, and records the learning rate of every applied step."""

    moments: ClassVar[Moments]
    """Names of the optimizer states, and whether they are per element or per row."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.resume(np.empty(0))

    def resume(self, rates: Floats) -> None:
        """Replaces the history of learning rates."""
        self.history = RateHistory(self._config.weight_decay, rates)

    @abstractmethod
    def apply_pending_updates_(self, rows: Rows, last_step_n: Tensor) -> None:
        """Applies the missed updates to rows last updated at the steps `last_step_n` (int32, on the CPU)."""

    def step_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        """Applies one step with learning rate `rate` to up-to-date rows. Must be called by all ranks, also without
        rows."""
        self.history.extend(np.array([rate]))
        rows[WEIGHT].mul_(1 - rate * self._config.weight_decay)
        self._update_(rows, gradients_nD, rate)

    @abstractmethod
    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        """The step without weight decay; called after the history has recorded it."""


class LazyAdamW(RowOptimizer):
    """Equal to AdamW on every row at every step, up to rounding."""

    moments: ClassVar[Moments] = {"exp_avg": "element", "exp_avg_sq": "element"}

    def resume(self, rates: Floats) -> None:
        super().resume(rates)
        self._lazy = LazyUpdates(self._config.betas, self._config.eps, self.history)

    def apply_pending_updates_(self, rows: Rows, last_step_n: Tensor) -> None:
        steps_S, inverse_n = np.unique(last_step_n.numpy().astype(np.int64), return_inverse=True)
        is_exact_S = self._lazy.needs_exact_updates(steps_S)
        methods = (~is_exact_S, self._lazy.quadrature_updates), (is_exact_S, self._lazy.exact_updates)
        for is_selected_S, compute_updates in methods:
            if is_selected_S.all():
                _apply_updates_(rows, compute_updates(steps_S), inverse_n)
            elif is_selected_S.any():
                selected_index_S = np.cumsum(is_selected_S) - 1
                row_index = np.flatnonzero(is_selected_S[inverse_n])
                index = torch.from_numpy(row_index).to(rows[WEIGHT].device)
                part = {name: values.index_select(0, index) for name, values in rows.items()}
                updates = compute_updates(steps_S[is_selected_S])
                _apply_updates_(part, updates, selected_index_S[inverse_n[row_index]])
                for name, values in rows.items():
                    values.index_copy_(0, index, part[name])

    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        (b1, b2), step = self._config.betas, self.history.steps
        mean, square = rows["exp_avg"], rows["exp_avg_sq"]
        mean.lerp_(gradients_nD, 1 - b1)
        square.mul_(b2).add_(self._squares(gradients_nD), alpha=1 - b2)
        divisor = (square.sqrt() / math.sqrt(1 - b2**step)).add_(self._config.eps)
        rows[WEIGHT].addcdiv_(mean, divisor, value=-rate / (1 - b1**step))

    def _squares(self, gradients_nD: Tensor) -> Tensor:
        return gradients_nD.square()


class RowwiseAdamW(LazyAdamW):
    """AdamW with one second moment per row, the mean over its elements; needs a third less memory."""

    moments: ClassVar[Moments] = {"exp_avg": "element", "exp_avg_sq": "row"}

    def _squares(self, gradients_nD: Tensor) -> Tensor:
        return gradients_nD.square().mean(1, keepdim=True)


class RowwiseAdaGrad(RowOptimizer):
    """AdaGrad with one number per row, the sum of its mean squared gradients; weight decay as in AdamW."""

    moments: ClassVar[Moments] = {"square_sum": "row"}

    def apply_pending_updates_(self, rows: Rows, last_step_n: Tensor) -> None:
        decay_n = torch.from_numpy(self.history.decay_factor(last_step_n.numpy(), self.history.steps))
        rows[WEIGHT].mul_(decay_n.to(rows[WEIGHT].device, rows[WEIGHT].dtype)[:, None])

    def _update_(self, rows: Rows, gradients_nD: Tensor, rate: float) -> None:
        total = rows["square_sum"].add_(gradients_nD.square().mean(1, keepdim=True))
        rows[WEIGHT].addcdiv_(gradients_nD, total.sqrt().add_(self._config.eps), value=-rate)


ROW_OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {
    "adamw": LazyAdamW,
    "adamw_row": RowwiseAdamW,
    "adagrad": RowwiseAdaGrad,
}
"""By `optimizer.table.rule`."""


def _apply_updates_(rows: Rows, updates_SC: Floats, inverse_n: Ints) -> None:
    """Applies missed updates of `LazyUpdates`: those of inverse_n[i] to row i. One pass over the rows per summand."""
    weight, mean, square = rows[WEIGHT], rows["exp_avg"], rows["exp_avg_sq"]
    device_updates_SC = torch.from_numpy(updates_SC).to(weight.device, weight.dtype)  # in one copy
    columns_nC = device_updates_SC[torch.from_numpy(inverse_n).to(weight.device)]
    decay, mean_factor, square_factor, *summands = columns_nC[:, :, None].unbind(1)
    root, total = square.sqrt(), torch.zeros_like(square)
    for term_weight, offset in zip(summands[0::2], summands[1::2], strict=True):
        total.addcdiv_(term_weight.expand_as(root), root + offset)
    weight.mul_(decay).addcmul_(mean, total, value=-1)
    mean.mul_(mean_factor)
    square.mul_(square_factor)
