"""The softmax over candidates of a few outputs at a time on a CPU: the reference, and its form in half precision."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megahead.config.objective import ON_CPU
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Score

# Row steps: the softmax of each output's row of scores, chunk by chunk. The interface, and an implementation with
# torch's operations, for CPUs (`row_kernel` is the one for GPUs).
#
# n outputs of a chunk, D features, w candidates of this rank (all of them with one rank).


LEAST_SHIFTED_SCORE = -60.0
"""Scores, after the largest was subtracted, are clamped to at least this: e^-60 is lost in rounding anyway, while the
denormal numbers around e^-90 make the products that follow 13 times slower on a CPU, and e^-inf takes 18 times as long
as others (measured, one core, 512 x 16,384 and 256 x 20,000)."""


class RowSums(NamedTuple):
    """What is needed of each output's softmax over all ranks' candidates; [n] each, in the type of the scores."""

    lse: Tensor
    """Logarithm of the sum of all exponentials of biased scores."""
    positive: Tensor
    """Score of the positive without its bias."""
    biased: Tensor
    """Score of the positive with its bias."""
    rivals: Tensor
    """Largest biased score of the other candidates."""

    def beside(self, other: RowSums) -> RowSums:
        """Those over the candidates of both, each of which has the positive or zeros in its place."""
        lse, rivals = torch.logaddexp(self.lse, other.lse), torch.maximum(self.rivals, other.rivals)
        return RowSums(lse, self.positive + other.positive, self.biased + other.biased, rivals)


class Residuals(NamedTuple):
    """The gradient of a chunk's loss by its scores: probabilities, minus 1 at the positive."""

    loss_n: Tensor
    """Of each output, over all ranks' candidates."""
    matrix_nw: Tensor
    """The gradient by this rank's scores, in the type that products read, divided by `weight_n1`; a buffer."""
    weight_n1: Tensor | None
    """None: ones."""
    slopes_nw: Tensor | None = None
    """Of the scores by the products that they come from, divided by the scale; None: ones."""

    def weighed(self, weight_n: Tensor) -> Residuals:
        """Of losses that count so often."""
        weight_n1 = weight_n[:, None].to(self.matrix_nw.dtype)
        both_n1 = weight_n1 if self.weight_n1 is None else self.weight_n1 * weight_n1
        return self._replace(loss_n=self.loss_n * weight_n.to(self.loss_n.dtype), weight_n1=both_n1)


class RowStep(Protocol):
    """Computes the scores of a chunk of outputs, and their sums. Collective over the ranks that share candidates."""

    chunk: int
    """Largest number of outputs at a time."""

    gradient_dtype: torch.dtype
    """Of the outputs' gradient, which is summed up over ranks."""

    def sums(self, outputs_nD: Tensor, positive_n: Tensor) -> RowSums:
        """positive_n: indices into this rank's candidates; outside of them for positives on other ranks."""
        ...

    def residuals(self, outputs_nD: Tensor, positive_n: Tensor) -> Residuals:
        """As `sums`."""
        ...

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        """result = left @ right."""
        ...

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, accumulated in the type of `total`."""
        ...


class TorchRowStep:
    """With torch's operations: exponentials overwrite the scores. Two small all-reduces per chunk."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        width, dtype = rows_wD.shape[0], torch.promote_types(rows_wD.dtype, torch.float32)
        bias_w, positive_bias_w = candidates.bias_U, candidates.positive_bias_U
        self._rows_wD, self._score, self._group, self._numerator = rows_wD, score, group, candidates.numerator
        self._bias_w = rows_wD.new_zeros(width, dtype=dtype) if bias_w is None else bias_w.detach().to(dtype)
        self._positive_bias_w = None if positive_bias_w is None else positive_bias_w.to(dtype)
        self.chunk = ON_CPU.outputs(outputs_ND.shape[0], width, dtype.itemsize)
        self._buffer, self.gradient_dtype = rows_wD.new_empty(self.chunk, width, dtype=dtype), dtype

    def sums(self, outputs_nD: Tensor, positive_n: Tensor) -> RowSums:
        scored = self._scored(outputs_nD, positive_n)
        scores_nw, held_n1 = scored.scores_nw, scored.held_n1
        lse_n = self._group.all_gather(scores_nw.logsumexp(dim=1)).logsumexp(dim=0)
        positive_n, biased_n = self._group.all_reduce_(scored.of_positives_n2).unbind(dim=1)
        own_n1 = scores_nw.gather(1, scored.index_n1)
        scores_nw.scatter_(1, scored.index_n1, own_n1.masked_fill(held_n1, -torch.inf))
        return RowSums(lse_n, positive_n, biased_n, self._group.all_reduce_max_(scores_nw.amax(dim=1)))

    def residuals(self, outputs_nD: Tensor, positive_n: Tensor) -> Residuals:
        scores_nw, index_n1, held_n1, of_positives_n2, slopes_nw = self._scored(outputs_nD, positive_n)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(LEAST_SHIFTED_SCORE).exp_()
        sums_n3 = torch.cat([scores_nw.sum(dim=1, keepdim=True), of_positives_n2], dim=1)
        total_n1, *own_n2 = self._group.all_reduce_(sums_n3).split(1, dim=1)
        scores_nw.scatter_add_(1, index_n1, -total_n1 * held_n1)
        loss_n1 = top_n1 + total_n1.log() - self._numerator(*own_n2)
        return Residuals(loss_n1.squeeze(1), scores_nw, 1 / total_n1, slopes_nw)

    def draws(self, outputs_nD: Tensor, positive_n: Tensor, uniform_n: Tensor) -> Tensor:
        """int64 [n]: of each output the place of a candidate drawn from its softmax, or -1 where that is another
        rank's. `uniform_n`: float64 in (0, 1); the candidates' probabilities lie end to end, in the order of places and
        ranks, and what lies there is drawn. Where no candidate has a weight it is the positive."""
        scored = self._scored(outputs_nD, positive_n)
        scores_nw, index_n, held_n = scored.scores_nw, scored.index_n1.squeeze(1), scored.held_n1.squeeze(1)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(LEAST_SHIFTED_SCORE).exp_()
        below_nk = _block_sums(scores_nw).cumsum(dim=1)
        below_Rn = self._group.all_gather(below_nk[:, -1].contiguous()).cumsum(dim=0)
        point_n, rank = uniform_n * below_Rn[-1], self._group.rank
        mine_n = (below_Rn[:-1] <= point_n).sum(dim=0) == rank
        place_n = _place_of(scores_nw, below_nk, point_n - below_Rn[rank - 1] if rank else point_n)
        none_n = below_Rn[-1].isnan()  # -inf less -inf is no number
        place_n, mine_n = torch.where(none_n, index_n, place_n), torch.where(none_n, held_n, mine_n)
        return torch.where(mine_n, place_n, -1)

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        torch.mm(left, right, out=result)

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.addmm_(left, right)

    def _scored(self, outputs_nD: Tensor, positive_n: Tensor) -> _Scored:
        scores_nw, width = self._buffer[: len(outputs_nD)], self._buffer.shape[1]
        slopes_nw = self._biased_(scores_nw, outputs_nD)
        held_n1 = ((positive_n >= 0) & (positive_n < width))[:, None]
        index_n = positive_n.clamp(0, width - 1)
        biased_n1 = scores_nw.gather(1, index_n[:, None])
        if self._positive_bias_w is None:
            positive_n1 = biased_n1 - self._bias_w[index_n, None]
        else:
            positive_n1 = (outputs_nD * self._rows_wD[index_n]).sum(dim=1, keepdim=True, dtype=scores_nw.dtype)
            self._score.link_(positive_n1)
            positive_n1 *= self._score.scale
            biased_n1 = biased_n1.where(~held_n1, positive_n1 + self._positive_bias_w[index_n, None])
            scores_nw.scatter_(1, index_n[:, None], biased_n1)
        of_positives_n2 = torch.cat([positive_n1, biased_n1], dim=1).where(held_n1, 0.0)
        return _Scored(scores_nw, index_n[:, None], held_n1, of_positives_n2, slopes_nw)

    def _biased_(self, scores_nw: Tensor, outputs_nD: Tensor) -> Tensor | None:
        """Fills in scores with biases; returns the slopes of the score's link."""
        if self._score.is_product:
            torch.addmm(self._bias_w, outputs_nD, self._rows_wD.T, alpha=self._score.scale, out=scores_nw)
            return None
        slopes_nw = self._score.link_(torch.mm(outputs_nD, self._rows_wD.T, out=scores_nw))
        scores_nw.mul_(self._score.scale).add_(self._bias_w)
        return slopes_nw


_BLOCK = 512


def _block_sums(weights_nw: Tensor) -> Tensor:
    """float64 [n, k]: the sums of blocks of _BLOCK weights, the last of which may have fewer (or none)."""
    whole = weights_nw.shape[1] // _BLOCK
    sums_nk = weights_nw[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(dim=2)
    rest_n1 = weights_nw[:, whole * _BLOCK :].sum(dim=1, keepdim=True)
    return torch.cat([sums_nk, rest_n1], dim=1).double()


def _place_of(weights_nw: Tensor, below_nk: Tensor, point_n: Tensor) -> Tensor:
    """int64 [n]: where the running sum of weights passes `point_n`. `below_nk`: the running sums of blocks, by which
    only the weights of one block are added up: in float64 all would take longer than their product."""
    point_n1, last = point_n[:, None], weights_nw.shape[1] - 1
    block_n1 = torch.searchsorted(below_nk, point_n1, right=True).clamp_max(below_nk.shape[1] - 1)
    end_n1 = below_nk.gather(1, block_n1)
    start_n1 = below_nk.gather(1, (block_n1 - 1).clamp_min(0)).where(block_n1 > 0, 0.0)
    index_nb = block_n1 * _BLOCK + torch.arange(_BLOCK, device=weights_nw.device)
    inside_nb = weights_nw.gather(1, index_nb.clamp_max(last)).where(index_nb <= last, 0.0)
    inside_nb = inside_nb.cumsum(dim=1, dtype=torch.float64)
    share_n1 = (point_n1 - start_n1) / (end_n1 - start_n1)  # of the block, whose sum was rounded
    place_n1 = torch.searchsorted(inside_nb, share_n1 * inside_nb[:, -1:], right=True)
    return (block_n1 * _BLOCK + place_n1).squeeze(1).clamp(0, last)


class _Scored(NamedTuple):
    """A chunk's scores with biases, and the indices of the positives in them."""

    scores_nw: Tensor
    index_n1: Tensor
    held_n1: Tensor
    """bool: whether this rank holds the positive; if not, `index_n1` points anywhere."""
    of_positives_n2: Tensor
    """Scores of positives without and with their biases; 0 for those of other ranks."""
    slopes_nw: Tensor | None
    """As in `Residuals`."""


# The row step with products in bf16, for CPUs with units for them.
#
# torch's bf16 products on CPUs are rounded to bf16, so scores are, as those of a bf16 head in Megatron or under
# autocast. Their softmax, the loss and the sums of gradients are in float32; residuals are rounded once more for the
# products that read them, as on GPUs.


class HalfRowStep(TorchRowStep):
    """A `RowStep` on bf16 inputs, for losses under scores that are products."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        self._half = rows_wD.new_empty(self._buffer.shape)
        """A chunk's scores and, once these are copied, its residuals."""

    def residuals(self, outputs_nD: Tensor, positive_n: Tensor) -> Residuals:
        found = super().residuals(outputs_nD, positive_n)
        return found._replace(matrix_nw=self._half[: len(outputs_nD)].copy_(found.matrix_nw))

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        result.copy_(torch.mm(left, right))

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(torch.mm(left.to(self._half.dtype), right.to(self._half.dtype)))

    def _biased_(self, scores_nw: Tensor, outputs_nD: Tensor) -> None:
        rounded_nw = torch.mm(outputs_nD, self._rows_wD.T, out=self._half[: len(outputs_nD)])
        scores_nw.copy_(rounded_nw).mul_(self._score.scale).add_(self._bias_w)
