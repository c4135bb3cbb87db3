"""The candidates of the softmax, their logit biases, and the training-free head that follows from them.

N targets of a micro-batch (or of its part in one candidate group), U candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig


@dataclass(frozen=True)
class Candidates:
    """The rows of the embedding in the denominator of the sampled softmax, and their logit biases."""

    ids_U: Tensor | None
    """int64 token ids, each once; None: all rows of the output matrix, in order."""

    bias_U: Tensor | None
    """Added to the candidates' scores; None (only for all rows): zeros. float64, rounded to the scores' type when used.
    -inf removes a candidate, except for the outputs whose target it is."""

    target_N: Tensor
    """int64: the index of each output's target among the candidates."""

    target_bias_U: Tensor | None = None
    """Replaces `bias_U` for outputs whose target the candidate is; None: `bias_U` for them too."""

    subtracts_target_bias: bool = False
    """Whether the numerator of the loss has the target's bias, too, as in an ordinary softmax. Only such a bias may
    have a gradient."""

    weight_N: Tensor | None = None
    """The weight of each output's loss; None: 1."""

    drawn_bias_U: Tensor | None = None
    """Replaces `bias_U` of an output's target where tokens are drawn, which must not know the target: log of what the
    id weighs on average among the other targets; None: `bias_U`."""

    def weighted(self, values_N: Tensor) -> Tensor:
        """[N], each output's value times its weight."""
        return values_N if self.weight_N is None else values_N * self.weight_N.to(values_N.dtype)

    def numerator(self, target_n: Tensor, biased_n: Tensor) -> Tensor:
        """The logits of the targets in the numerator: without bias, or with it."""
        return biased_n if self.subtracts_target_bias else target_n

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on `device`; copies from pinned memory are asynchronous."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Candidates:
        """The same in pinned memory."""
        return self._mapped(Tensor.pin_memory)

    def padded(self, multiple: int) -> Candidates:
        """Pads the number of candidates to a multiple, so that shapes repeat. The padding repeats the first candidate
        with the bias -inf, so that no more rows of the embedding are read."""
        if self.ids_U is None or self.bias_U is None:
            return self
        missing = -self.ids_U.numel() % multiple
        return replace(
            self,
            ids_U=torch.cat([self.ids_U, self.ids_U[:1].expand(missing)]),
            bias_U=F.pad(self.bias_U, (0, missing), value=-torch.inf),
            target_bias_U=None if self.target_bias_U is None else F.pad(self.target_bias_U, (0, missing)),
            drawn_bias_U=None if self.drawn_bias_U is None else F.pad(self.drawn_bias_U, (0, missing)),
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Candidates:
        """The same with `change` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


def unique_candidates(target_ids_N: Tensor) -> Candidates:
    """The unique targets, with the bias log(count): equal to the paper's sum over all N targets.

    sum_k exp(o.e(x_k)) over N targets = sum_u exp(o.e_u + log c_u) over the U <= N unique ones. O(N log N).
    """
    ids_U, target_N, counts_U = torch.unique(target_ids_N, return_inverse=True, return_counts=True)
    return Candidates(ids_U, counts_U.double().log(), target_N)


def vocabulary_candidates(
    target_ids_N: Tensor, bias_V: Tensor | None = None, weight_N: Tensor | None = None
) -> Candidates:
    """The whole vocabulary: the ordinary language-model softmax."""
    return Candidates(None, bias_V, target_ids_N, weight_N=weight_N)


# The bias of each candidate, in which alone the headless objectives differ.
#
# All are `loss_i = log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p - b'_p`, where p is the target
# of output i and s_u = h_i.e_u / T. b' may differ from b, and only some objectives have the last term.
#
# q: distribution of targets, r: of random negatives; N targets of a candidate group, M random negatives, P different
# ids among both.


Bias = Literal["paper", "once", "corrected", "own_once"]


@dataclass(frozen=True)
class Weighting:
    """Biases of one candidate group's candidates; float64 [P]."""

    bias_P: Tensor
    """b: for outputs with another target than the id."""

    target_bias_P: Tensor
    """b': for outputs whose target the id is."""

    subtracts_target_bias: bool
    """Whether the loss has the term - b'_p. The paper's loss has not, which does not change gradients."""


def compute_weighting(bias: Bias, multiplicity_P: Tensor, log_inclusion_P: Tensor | None) -> Weighting:
    """The biases of ids that occur `multiplicity_P` times among targets and random negatives, by the setting `bias`.

    log_inclusion_P: log-probability that an id is a candidate at all, for `corrected`.
    """
    log_count_P = multiplicity_P.double().log()
    zeros_P = torch.zeros_like(log_count_P)
    if bias == "paper":
        return Weighting(log_count_P, log_count_P, subtracts_target_bias=False)
    if bias == "once":
        return Weighting(zeros_P, zeros_P, subtracts_target_bias=False)
    if bias == "own_once":
        return Weighting(log_count_P, zeros_P, subtracts_target_bias=False)
    if log_inclusion_P is None:
        raise ValueError("the corrected bias needs the probabilities of being a candidate")
    return Weighting(-log_inclusion_P, -log_inclusion_P, subtracts_target_bias=True)


def weighting_without_one(bias: Bias, multiplicity_P: Tensor, log_inclusion_P: Tensor | None) -> Tensor:
    """float64 [P]: the bias of each candidate if it occurred once less, as among the other targets. `log_mean_weight`
    is its average, for a known q."""
    return compute_weighting(bias, multiplicity_P - 1, log_inclusion_P).bias_P.masked_fill(
        multiplicity_P == 1, -torch.inf
    )


def log_inclusion(log_q_V: Tensor, targets: float, log_r_V: Tensor | None = None, draws: int = 0) -> Tensor:
    """log pi, float64: pi_u = 1 - (1 - q_u)^N (1 - r_u)^M, the probability that id u is among a group's candidates."""
    log_absent_V = targets * torch.log1p(-log_q_V.double().exp())
    if log_r_V is not None:
        log_absent_V = log_absent_V + draws * torch.log1p(-log_r_V.double().exp())
    return torch.log(-torch.expm1(log_absent_V))


def log_mean_weight(
    bias: Bias, log_q_V: Tensor, targets: float, log_r_V: Tensor | None = None, draws: int = 0
) -> Tensor:
    """float64: log of the mean weight of each id in a group with so many targets and random negatives. The weight is 0
    if the id is no candidate. Without the b = -log pi of `corrected`."""
    if bias in ("once", "corrected"):
        return log_inclusion(log_q_V, targets, log_r_V, draws)
    weight_V = targets * log_q_V.double().exp()
    return (weight_V if log_r_V is None else weight_V + draws * log_r_V.double().exp()).log()


# Sampling on the CPU: random negatives, and a subset of candidates if there are too many.
#
# Results depend on the generator's seed alone: the same on every machine and mesh. V vocabulary, P some ids.


def draw_ids(cumulative_V: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """int64 [draws]: ids drawn with replacement. `cumulative_V`: float64 cumulative sums of weights. O(draws log V)."""
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64) * cumulative_V[-1]
    return torch.searchsorted(cumulative_V, uniform, right=True).clamp_(max=len(cumulative_V) - 1)


def inclusion_probabilities(weights_P: Tensor, size: int) -> Tensor:
    """float64 [P]: probabilities that add up to `size`, proportional to the weights but at most 1.

    With these, a sample of `size` estimates a sum of terms near the weights with the least variance. Ids of weight 0
    have 0; all others have 1 if there are no more than `size` of them.
    """
    certain_P = torch.zeros_like(weights_P, dtype=torch.bool)
    while True:
        rest_P = weights_P.double().masked_fill(certain_P, 0.0)
        left, total = size - int(certain_P.sum()), rest_P.sum()
        if total == 0:
            return certain_P.double()
        probabilities_P = rest_P * (left / total)
        over_P = probabilities_P >= 1.0
        if not over_P.any():
            return probabilities_P + certain_P
        certain_P |= over_P


def systematic_sample(probabilities_P: Tensor, generator: torch.Generator) -> Tensor:
    """bool [P]: a sample that has each id with its given probability; its size is their sum, rounded.

    Systematic sampling (Madow 1949): of the shuffled, randomly shifted cumulative sums, those that pass an integer are
    chosen.
    """
    chosen_P = probabilities_P >= 1.0
    open_ids = ((probabilities_P > 0) & ~chosen_P).nonzero().squeeze(1)
    open_ids = open_ids[torch.randperm(len(open_ids), generator=generator)]
    ends = probabilities_P[open_ids].cumsum(0) + torch.rand(1, generator=generator, dtype=torch.float64)
    crossings = ends.floor().diff(prepend=torch.zeros(1, dtype=torch.float64))
    chosen_P[open_ids[crossings > 0]] = True
    return chosen_P


# The language-model head that a headless model has without training: `E h / T + bias`.
#
# The contrastive optimum is h.e_v / T = log p(v | context) - bias(v) + const(context), where bias(v) is the log of the
# mean weight of id v among the candidates. For the paper's objective it is log q, q the distribution of the targets
# trained on (so that the scores are pointwise mutual information, PMI). Adding it back gives log p(v | context).
#
# This p is the distribution of targets that are chosen as in training. When masking by frequency, id v is chosen with
# a probability s_v that is higher for rare ids, so p(v) is proportional to s_v times the probability of v in text,
# whose unigram distribution is proportional to q / s. Adding `log (q / s) - log q` gives the p of text in which all
# tokens are masked equally often; for the paper's objective both terms together are log (q / s).
#
# h output, e_v input embedding of id v, T temperature, V vocabulary.


def log_unigram(counts_V: Tensor, vocab_size: int, prior_counts_V: Tensor | None = None) -> Tensor:
    """log q over the first `vocab_size` ids, float32 and finite: the bias of the paper's objective.

    counts_V: int64 counts of the targets trained on (at least vocab_size long). Smoothed by `vocab_size` pseudo-counts,
    distributed as `prior_counts_V + 1` (the whole dataset's counts), or evenly if that is None.
    """
    counts = counts_V[:vocab_size].double()
    prior = torch.ones_like(counts) if prior_counts_V is None else prior_counts_V[:vocab_size].double() + 1
    smoothed = counts + vocab_size * prior / prior.sum()
    return (smoothed.log() - smoothed.sum().log()).float()


def log_negatives(config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None) -> Tensor:
    """log r over `vocab_size` ids: the distribution from which an objective draws separate negatives."""
    uniform = config.negatives_from == "uniform" or token_counts_V is None
    counts_V = torch.zeros(vocab_size, dtype=torch.int64) if uniform else token_counts_V
    assert counts_V is not None
    return log_unigram(counts_V, vocab_size)


def training_free_bias(
    config: ObjectiveConfig,
    vocab_size: int,
    counts_V: Tensor,
    token_counts_V: Tensor | None,
    group_targets: float,
    evaluation_target_counts_V: Tensor | None = None,
) -> Tensor | None:
    """[V] float32, the bias that turns `E h / T` into log p; None if that is log p already or the head is trained.

    counts_V: counts of the targets trained on. token_counts_V: of the training text. group_targets: mean number of
    targets in a candidate group, on which only random negatives and `once` depend. evaluation_target_counts_V: of the
    targets that p is evaluated on, if training chose others. `own_once` is not a proper scoring rule and has no exact
    head: the paper's is returned.
    """
    if config.head() != "pmi":
        return None
    weight_V = log_q_V = log_unigram(counts_V, vocab_size, token_counts_V)
    draws = config.negatives
    if draws or config.bias == "once":  # else the mean weight of an id is its frequency as a target
        log_r_V = log_negatives(config, vocab_size, token_counts_V) if draws else None
        weight_V = log_mean_weight(config.bias, log_q_V, group_targets, log_r_V, draws)
        weight_V = (weight_V if config.bias == "once" else weight_V - log(group_targets + draws)).float()
    return (
        weight_V
        if evaluation_target_counts_V is None
        else weight_V + log_unigram(evaluation_target_counts_V, vocab_size) - log_q_V
    )


def evaluation_target_counts(config: RunConfig, token_counts_V: Tensor | None) -> Tensor | None:
    """int64 [V]: how often each id would be a target if the training text were masked as held-out rows are (every token
    with the same probability); None if training does so too, or masks nothing, or `token_counts_V` are not
    known (all 0)."""
    if config.masking is None or config.model.is_causal:
        return None
    auxiliary = config.objective.auxiliary()
    skews_targets = config.masking.skews_targets() or (auxiliary is not None and auxiliary.skews_targets)
    if not skews_targets or token_counts_V is None or not token_counts_V.any():
        return None
    special = config.masking.unmaskable_ids(config.data.end_token)
    counts_V = token_counts_V[: config.model.vocab_size].clone()
    counts_V[[id_ for id_ in special if id_ < len(counts_V)]] = 0
    return counts_V
