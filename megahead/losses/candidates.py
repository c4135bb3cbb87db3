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
    """Added to the candidates' scores; None (only without `ids_U`): zeros. float64, rounded to the scores' dtype when
    used. -inf removes a candidate, except for the outputs whose target it is."""

    target_N: Tensor
    """int64: the index of each output's target among the candidates."""

    as_target_bias_U: Tensor | None = None
    """Replaces `bias_U` of each output's own target; None: `bias_U`."""

    target_logit_has_bias: bool = False
    """Whether the target's bias is also in the numerator of the loss, as in an ordinary softmax. Required of a bias
    with a gradient."""

    weight_N: Tensor | None = None
    """The weight of each output's loss; None: 1."""

    sampling_bias_U: Tensor | None = None
    """Replaces `bias_U` of each output's own target when ELECTRA's generator samples from the softmax: the bias
    that the id would have if this output did not have it as its target. Where the distribution of targets is known, the
    log of the mean of exp(bias) over groups. None: `bias_U`."""

    def apply_weights(self, values_N: Tensor) -> Tensor:
        """[N]: each output's value times its weight."""
        return values_N if self.weight_N is None else values_N * self.weight_N.to(values_N.dtype)

    def target_logit(self, logit_n: Tensor, biased_logit_n: Tensor) -> Tensor:
        """[n]: the target logits of n outputs in the numerator of the loss, with or without bias."""
        return biased_logit_n if self.target_logit_has_bias else logit_n

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on `device`; copies from pinned memory are asynchronous."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def with_float32_biases(self) -> Candidates:
        """The same candidates with biases rounded to the dtype of a GPU's scores."""
        return self.map_tensors(lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)

    def pad_to_multiple(self, multiple: int) -> Candidates:
        """The same candidates, padded to a multiple so that shapes repeat. The padding repeats the first candidate with
        the bias -inf, so that no further rows of the embedding are read."""
        if self.ids_U is None or self.bias_U is None:
            return self
        missing = -self.ids_U.numel() % multiple
        return replace(
            self,
            ids_U=torch.cat([self.ids_U, self.ids_U[:1].expand(missing)]),
            bias_U=F.pad(self.bias_U, (0, missing), value=-torch.inf),
            as_target_bias_U=None if self.as_target_bias_U is None else F.pad(self.as_target_bias_U, (0, missing)),
            sampling_bias_U=None if self.sampling_bias_U is None else F.pad(self.sampling_bias_U, (0, missing)),
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Candidates:
        """The same candidates with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def unique_candidates(target_ids_N: Tensor) -> Candidates:
    """The unique targets as candidates with the bias log(count): equal to the paper's sum over all N targets.

    sum_k exp(o.e(x_k)) over N targets = sum_u exp(o.e_u + log c_u) over the U <= N unique ones. O(N log N).
    """
    ids_U, target_N, counts_U = torch.unique(target_ids_N, return_inverse=True, return_counts=True)
    return Candidates(ids_U, counts_U.double().log(), target_N)


def all_rows_as_candidates(
    target_ids_N: Tensor, bias_V: Tensor | None = None, weight_N: Tensor | None = None
) -> Candidates:
    """All rows of the output matrix, in order: for the vocabulary the ordinary language-model softmax."""
    return Candidates(None, bias_V, target_ids_N, weight_N=weight_N)


# The bias of each candidate: the only difference between the headless objectives.
#
# All are `loss_i = log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p - b'_p`, where p is the target
# of output i and s_u = h_i.e_u / T. b' may differ from b, and only some objectives have the last term.
#
# q: distribution of targets, r: of random negatives; N targets of a candidate group, M random negatives, P distinct
# ids among both.


BiasRule = Literal["paper", "once", "corrected", "own_once"]
"""The weight exp(b) of an id: its count (`paper`), 1 (`once`), 1 / its probability of being a candidate (`corrected`);
`own_once`: as `paper`, but 1 as the target."""


@dataclass(frozen=True)
class CandidateBiases:
    """Biases of the candidates of one group; float64 [P]."""

    bias_P: Tensor
    """b: of an id as a negative."""

    as_target_bias_P: Tensor
    """b': of an id as the target."""

    target_logit_has_bias: bool
    """Whether the loss has the term - b'_p. The paper's loss does not have it, which does not change gradients."""


def compute_biases(bias: BiasRule, counts_P: Tensor, log_inclusion_P: Tensor | None) -> CandidateBiases:
    """The biases of ids that occur `counts_P` times among targets and random negatives, for the setting `bias`.

    log_inclusion_P: log-probability that an id is among the candidates, for `corrected`.
    """
    log_counts_P = counts_P.double().log()
    zeros_P = torch.zeros_like(log_counts_P)
    if bias != "corrected":
        rules = {"paper": (log_counts_P, log_counts_P), "once": (zeros_P, zeros_P), "own_once": (log_counts_P, zeros_P)}
        return CandidateBiases(*rules[bias], target_logit_has_bias=False)
    if log_inclusion_P is None:
        raise ValueError("the corrected bias needs the probabilities of being a candidate")
    return CandidateBiases(-log_inclusion_P, -log_inclusion_P, target_logit_has_bias=True)


def leave_one_out_bias(bias: BiasRule, counts_P: Tensor, log_inclusion_P: Tensor | None) -> Tensor:
    """float64 [P]: the bias of each id with one occurrence fewer, as counted among the other targets. For a known q
    `log_mean_weight` is its average."""
    return compute_biases(bias, counts_P - 1, log_inclusion_P).bias_P.masked_fill(counts_P == 1, -torch.inf)


def log_inclusion(log_q_V: Tensor, num_targets: float, log_r_V: Tensor | None = None, num_negatives: int = 0) -> Tensor:
    """log pi, float64: pi_u = 1 - (1 - q_u)^N (1 - r_u)^M, the probability that id u is among a group's candidates."""
    log_absent_V = num_targets * torch.log1p(-log_q_V.double().exp())
    if log_r_V is not None:
        log_absent_V = log_absent_V + num_negatives * torch.log1p(-log_r_V.double().exp())
    return torch.log(-torch.expm1(log_absent_V))


def log_mean_weight(
    bias: BiasRule, log_q_V: Tensor, num_targets: float, log_r_V: Tensor | None = None, num_negatives: int = 0
) -> Tensor:
    """float64: log of the mean weight exp(b) of each id in a group of `num_targets` targets and `num_negatives` random
    negatives; an absent id has weight 0. For `corrected` the weight of a present id is taken as 1, not 1 / pi."""
    if bias in ("once", "corrected"):
        return log_inclusion(log_q_V, num_targets, log_r_V, num_negatives)
    weight_V = num_targets * log_q_V.double().exp()
    return (weight_V if log_r_V is None else weight_V + num_negatives * log_r_V.double().exp()).log()


# Sampling on the CPU: random negatives, and a subset of the candidates if there are too many.
#
# Results depend only on the generator's seed: they are the same on every machine and mesh. V vocabulary, P ids.


def sample_ids(cumulative_V: Tensor, num_ids: int, generator: torch.Generator) -> Tensor:
    """int64 [num_ids]: ids sampled with replacement, in O(num_ids log V). `cumulative_V`: float64 cumulative sums of
    their weights."""
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64) * cumulative_V[-1]
    return torch.searchsorted(cumulative_V, uniform, right=True).clamp_(max=len(cumulative_V) - 1)


def inclusion_probabilities(weights_P: Tensor, sample_size: int) -> Tensor:
    """float64 [P]: probabilities that add up to `sample_size`, proportional to the weights but at most 1.

    Sampling with them has the least variance for sums of terms roughly proportional to the weights. Ids of weight 0
    have probability 0; all others have 1 if there are at most `sample_size` of them.
    """
    is_certain_P = torch.zeros_like(weights_P, dtype=torch.bool)
    while True:
        uncertain_weights_P = weights_P.double().masked_fill(is_certain_P, 0.0)
        remaining_size, total = sample_size - int(is_certain_P.sum()), uncertain_weights_P.sum()
        if total == 0:
            return is_certain_P.double()
        probabilities_P = uncertain_weights_P * (remaining_size / total)
        exceeds_one_P = probabilities_P >= 1.0
        if not exceeds_one_P.any():
            return probabilities_P + is_certain_P
        is_certain_P |= exceeds_one_P


def systematic_sample(probabilities_P: Tensor, generator: torch.Generator) -> Tensor:
    """bool [P]: whether each id is in the sample, with its probability; the sample's size is their sum, rounded.

    Systematic sampling (Madow 1949): selects the ids at which the shuffled, randomly shifted cumulative sum passes an
    integer.
    """
    is_sampled_P = probabilities_P >= 1.0
    uncertain_index = ((probabilities_P > 0) & ~is_sampled_P).nonzero().squeeze(1)
    uncertain_index = uncertain_index[torch.randperm(len(uncertain_index), generator=generator)]
    cumulative = probabilities_P[uncertain_index].cumsum(0) + torch.rand(1, generator=generator, dtype=torch.float64)
    crossings = cumulative.floor().diff(prepend=torch.zeros(1, dtype=torch.float64))
    is_sampled_P[uncertain_index[crossings > 0]] = True
    return is_sampled_P


# The training-free language-model head of a headless model: `E h / T + bias`.
#
# The contrastive optimum is h.e_v / T = log p(v | context) - bias(v) + const(context), where bias(v) is the log of the
# mean weight of id v among the candidates. For the paper's objective it is log q, q the distribution of the targets
# trained on (so that the scores are pointwise mutual information, PMI). Adding it back gives log p(v | context).
#
# This p is the distribution of targets as selected in training. Masking by frequency selects id v with a probability
# s_v that is higher for rare ids, so p(v) is proportional to s_v times the probability of v in text. The text's
# unigram distribution is proportional to q / s. Adding `log (q / s) - log q` gives the p of text in which all tokens
# are masked equally often; for the paper's objective both biases add up to log (q / s).
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


def log_negative_probabilities(config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None) -> Tensor:
    """log r over `vocab_size` ids: the distribution that random negatives are sampled from."""
    uniform = config.negatives_from == "uniform" or token_counts_V is None
    counts_V = torch.zeros(vocab_size, dtype=torch.int64) if uniform else token_counts_V
    assert counts_V is not None
    return log_unigram(counts_V, vocab_size)


def training_free_bias(
    config: ObjectiveConfig,
    vocab_size: int,
    counts_V: Tensor,
    token_counts_V: Tensor | None,
    mean_group_targets: float,
    evaluation_target_counts_V: Tensor | None = None,
) -> Tensor | None:
    """[V] float32: the bias that turns `E h / T` into log p; None if `E h / T` is log p already, or the head is
    trained.

    counts_V: counts of the targets trained on. token_counts_V: of the training text. mean_group_targets: mean number of
    targets in a candidate group, used only with random negatives or `once`. evaluation_target_counts_V: of the
    targets that p is evaluated on, if training selects others. `own_once` is not a proper scoring rule and has no exact
    head; it gets the paper's.
    """
    if config.head() != "pmi":
        return None
    bias_V = log_q_V = log_unigram(counts_V, vocab_size, token_counts_V)
    num_negatives = config.negatives
    if num_negatives or config.bias == "once":  # else the mean weight of an id is its frequency as a target
        log_r_V = log_negative_probabilities(config, vocab_size, token_counts_V) if num_negatives else None
        bias_V = log_mean_weight(config.bias, log_q_V, mean_group_targets, log_r_V, num_negatives)
        bias_V = (bias_V if config.bias == "once" else bias_V - log(mean_group_targets + num_negatives)).float()
    if evaluation_target_counts_V is None:
        return bias_V
    return bias_V + log_unigram(evaluation_target_counts_V, vocab_size) - log_q_V


def evaluation_target_counts(config: RunConfig, token_counts_V: Tensor | None) -> Tensor | None:
    """int64 [V]: how often each id would be a target if the training text were masked as held-out rows are (every token
    with the same probability); None if training masks like this or not at all, or `token_counts_V` are all 0."""
    if config.masking is None or config.model.is_causal:
        return None
    skews_targets = config.masking.skews_targets() or config.objective.auxiliary_or_empty().skews_targets
    if not skews_targets or token_counts_V is None or not token_counts_V.any():
        return None
    special_ids = config.masking.unmaskable_ids(config.data.end_token)
    counts_V = token_counts_V[: config.model.vocab_size].clone()
    counts_V[[id_ for id_ in special_ids if id_ < len(counts_V)]] = 0
    return counts_V
