"""The language-model head that a headless model has without training: `E h / T + bias`.

The contrastive optimum is h.e_v / T = log p(v | context) - bias(v) + const(context), where bias(v) is the log of the
mean weight of id v among the candidates. For the paper's objective it is log q, q the distribution of the targets
trained on (so that the scores are pointwise mutual information, PMI). Adding it back gives log p(v | context).

This p is the distribution of targets that are chosen as in training. When masking by frequency, id v is chosen with a
probability s_v that is higher for rare ids, so p(v) is proportional to s_v times the probability of v in text, whose
unigram distribution is proportional to q / s. Adding `log (q / s) - log q` gives the p of text in which all tokens are
masked equally often; for the paper's objective both terms together are log (q / s).

h output, e_v input embedding of id v, T temperature, V vocabulary.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from megahead.config import ObjectiveConfig
from megahead.objectives.weights import log_mean_weight


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
    log_q_V = log_unigram(counts_V, vocab_size, token_counts_V)
    weight_V = _log_weight(config, log_q_V, token_counts_V, group_targets)
    return (
        weight_V
        if evaluation_target_counts_V is None
        else weight_V + log_unigram(evaluation_target_counts_V, vocab_size) - log_q_V
    )


def _log_weight(
    config: ObjectiveConfig, log_q_V: Tensor, token_counts_V: Tensor | None, group_targets: float
) -> Tensor:
    """[V] float32: log of each id's mean weight among the candidates, up to a constant."""
    draws = config.negatives
    log_r_V = log_negatives(config, len(log_q_V), token_counts_V) if draws else None
    if config.bias != "once" and log_r_V is None:
        return log_q_V
    weight_V = log_mean_weight(config.bias, log_q_V, group_targets, log_r_V, draws)
    return (weight_V if config.bias == "once" else weight_V - log(group_targets + draws)).float()
