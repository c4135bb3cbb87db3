"""The softmax over candidates: a plain reference, the loss in bounded memory, and sums for evaluation.

N outputs, D features, U candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.objectives.candidates import Candidates
from megahead.objectives.detection import DetectionSums
from megahead.objectives.scores import Dot, Score
from megahead.objectives.three_products import softmax_draws, softmax_sums, three_product_loss

DOT = Dot()


def candidate_loss_reference(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """`sum_i w_i [ log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p ]`, written out; under
    `subtracts_positive_bias` also with `- b'_p`.

    w is `weight_N`, or 1 if that is None. p is the positive of output i, s_u its `score` against row u (h_i.e_u / T, T
    the temperature); b is `bias_U`, b' is `positive_bias_U`, or b if that is None. Holds N x U scores.
    """
    positive_N1 = candidates.positive_N[:, None]
    scores_NU = score.written_out(outputs_ND, rows_UD)
    positive_scores_N1 = scores_NU.gather(1, positive_N1)
    biased_NU = scores_NU if candidates.bias_U is None else scores_NU + candidates.bias_U
    if candidates.positive_bias_U is not None:
        biased_NU = biased_NU.scatter(1, positive_N1, positive_scores_N1 + candidates.positive_bias_U[positive_N1])
    own_N1 = candidates.numerator(positive_scores_N1, biased_NU.gather(1, positive_N1))
    return candidates.weighed(biased_NU.logsumexp(dim=1) - own_N1.squeeze(1)).sum()


def candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """The same as `candidate_loss_reference`, a scalar, in bounded memory.

    outputs_ND, rows_UD: any float type; scores are float32 (float64 for float64 inputs), and the largest is subtracted,
    so that scores of +-1e4 stay finite. rows_UD: the rows of `candidates`, in their order. N = 0 gives 0, connected to
    its inputs.

    On CUDA in half precision (or under autocast to it) gradients use probabilities that are rounded to it; so they do
    in bf16 on CPUs with units for it, where scores are rounded, too.
    """
    return grouped_candidate_loss(outputs_ND, rows_UD, candidates, score, Group())


def grouped_candidate_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> Tensor:
    """`candidate_loss` with candidates split over `group`; arguments as of `three_product_loss`. Collective."""
    outputs_NE, rows_wE = score.outputs(outputs_ND), score.rows(rows_wD)
    if outputs_ND.shape[0] == 0:
        inputs = [outputs_NE, rows_wE] if candidates.bias_U is None else [outputs_NE, rows_wE, candidates.bias_U]
        return torch.stack([each[:0].float().sum() for each in inputs]).sum()
    return three_product_loss(outputs_NE, rows_wE, candidates, score, group)


@torch.no_grad()
def grouped_misses(outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> Tensor:
    """bool [N]: whether another candidate is at least as probable as the target; as `grouped_evaluation_sums`.
    Collective."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.bool, device=outputs_ND.device)
    sums = softmax_sums(score.outputs(outputs_ND), score.rows(rows_wD), candidates, score, group)
    return sums.biased <= sums.rivals


@torch.no_grad()
def grouped_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, uniform_N: Tensor, group: Group
) -> Tensor:
    """int64 [N]: the place of a candidate drawn for each output from `softmax_u(s_u + b_u)`, where its own target
    weighs what it would on average if it were not known (`drawn_bias_U`). -1 where that is another rank's; arguments as
    of `three_product_loss`, and `uniform_N`: random numbers, float64 in (0, 1). Collective.

    Candidates weigh so that, whatever the objective, their sum of exponentials is on average over groups one over the
    vocabulary, with the bias of the training-free head. They are proposals of which one is drawn by its importance: the
    original about as often as that head says, and over many groups others nearly so (the quotient of two averages is
    no average). From all ids draws are exact."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=outputs_ND.device)
    among = replace(candidates, positive_bias_U=candidates.drawn_bias_U)
    return softmax_draws(score.outputs(outputs_ND), score.rows(rows_wD), among, score, uniform_N, group)


class EvaluationSums(NamedTuple):
    """How well N outputs predict their targets, summed up. A tuple, since ZeRO-3 looks for tensors in outputs."""

    loss: float
    """Negative log-probability in nats, of each target as often as it counts."""

    correct: int
    """Targets that were more probable than every other candidate."""

    targets: int
    """N."""

    weight: float
    """How often all of them count together: `targets`, unless they have weights of their own."""

    detection_loss: float = 0.0
    """This and what follows: where tokens drawn in place of the targets are to be told from others (`detection`)."""

    judged: float = 0.0
    replaced: float = 0.0
    found: float = 0.0
    kept: float = 0.0

    @property
    def detection(self) -> DetectionSums[float]:
        """How well drawn tokens were told from others; zeros where none were drawn."""
        return DetectionSums(self.detection_loss, self.judged, self.replaced, self.found, self.kept)

    @staticmethod
    def of(loss_N: Tensor, correct_N: Tensor, candidates: Candidates) -> EvaluationSums:
        """From each target's negative log-probability, and whether it was the most probable."""
        ones_N = torch.ones_like(loss_N, dtype=torch.float64)
        loss, weight = (float(candidates.weighed(each_N.double()).sum()) for each_N in (loss_N, ones_N))
        return EvaluationSums(loss, int(correct_N.sum()), loss_N.numel(), weight)


def evaluation_sums(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> EvaluationSums:
    """Of the distribution `softmax_u(s_u + b_u)`; unlike in the loss, the target's score has its bias."""
    return grouped_evaluation_sums(outputs_ND, rows_UD, candidates, score, Group())


@torch.no_grad()
def grouped_evaluation_sums(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> EvaluationSums:
    """`evaluation_sums` with candidates split over `group`; arguments as of `three_product_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return EvaluationSums(0.0, 0, 0, 0.0)
    sums = softmax_sums(score.outputs(outputs_ND), score.rows(rows_wD), candidates, score, group)
    return EvaluationSums.of(sums.lse - sums.biased, sums.biased > sums.rivals, candidates)
