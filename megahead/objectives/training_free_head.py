"""The language-model head that a headless model has without training: `E h / T + bias`.

The contrastive optimum is o.e_v = log p(v | context) - bias(v) + const(context), where bias is the log of how much
id v weighs among the candidates on average: log q, pointwise mutual information (PMI), for the paper's objective,
q being the distribution of the targets it was trained against. Adding it back gives log p(v | context).

That p is of targets drawn as in training. Where an id was the likelier to be a target the rarer it is (a chance s_v,
masking by frequency), p is in proportion to s_v times what stands there in text, whose unigram distribution is q / s:
`log (q / s) - log q` more makes it that of the text, which masks all tokens alike. For the paper's objective the whole
is log (q / s).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.config import ObjectiveConfig
from megahead.objectives.weights import log_inclusion


def log_unigram(counts_V: Tensor, vocab_size: int, prior_counts_V: Tensor | None = None) -> Tensor:
    """log q over the first `vocab_size` ids, float32 and finite: the bias of the paper's objective.

    counts_V: int64 counts of the targets trained on (at least vocab_size long). Ids never seen yet are smoothed
    by `vocab_size` pseudo-observations, spread by `prior_counts_V + 1` (the whole dataset's counts), or evenly.
    """
    counts = counts_V[:vocab_size].double()
    prior = torch.ones_like(counts) if prior_counts_V is None else prior_counts_V[:vocab_size].double() + 1
    smoothed = counts + vocab_size * prior / prior.sum()
    return (smoothed.log() - smoothed.sum().log()).float()


def log_negatives(config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None) -> Tensor:
    """log r over `vocab_size` ids: what an objective's separate negatives are drawn from."""
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
    """[V] float32, the bias that makes `E h / T` log p; None where it is that already (or has a trained head).

    counts_V: of the targets trained on. token_counts_V: of the training text. group_targets: mean number of targets in
    a group, which only separate negatives and `once` depend on. evaluation_target_counts_V: of the targets that p is
    evaluated on, where training drew others. `own_once` is not a proper scoring rule and has no exact head: the
    paper's is returned.
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
    """[V] float32: how much each id weighs among the candidates on average, up to a constant."""
    draws = config.negatives
    log_r_V = log_negatives(config, len(log_q_V), token_counts_V) if draws else None
    if config.bias == "once":
        return log_inclusion(log_q_V, group_targets, log_r_V, draws).float()
    if log_r_V is None:
        return log_q_V
    expected_V = group_targets * log_q_V.double().exp() + draws * log_r_V.double().exp()
    return (expected_V / (group_targets + draws)).log().float()
