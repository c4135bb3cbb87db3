"""The objectives: each selects the candidates and their biases; the softmax over them is the same for all.

Headless: Contrastive Weight Tying, Godey, de la Clergerie, Sagot, "Headless Language Models", arXiv
2309.08351. N targets of a micro-batch, G targets of its candidate group, M random negatives, P distinct ids among G and
M (the group's candidate set), U candidates, V vocabulary. q: distribution of targets, r: of random negatives, pi:
probability of being a candidate (`log_inclusion`). No function costs O(V) per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from operator import attrgetter

import torch
from torch import Tensor, nn

from megahead.config.objective import ObjectiveConfig
from megahead.errors import ArgumentError, ConfigError
from megahead.losses.candidates import (
    CandidateBiases,
    Candidates,
    all_rows_as_candidates,
    compute_biases,
    inclusion_probabilities,
    leave_one_out_bias,
    log_inclusion,
    log_mean_weight,
    log_negative_probabilities,
    log_unigram,
    sample_ids,
    systematic_sample,
    unique_candidates,
)
from megahead.losses.scores import Dot
from megahead.losses.softmax import candidate_loss

NO_TARGET = -100
"""The target id of an output without a target, as in Hugging Face and torch."""


@dataclass(frozen=True)
class SharedCandidateSet:
    """Candidates that all outputs of a group share, and the biases of all its targets."""

    ids_P: Tensor
    """int64, increasing: all targets of the group and all random negatives."""

    biases: CandidateBiases
    """Log-weights of candidates in the denominator: `bias_P` of an id as a negative, `as_target_bias_P` as an output's
    own target, where some objectives count it once. Some have the target's in the numerator too."""

    shared_bias_P: Tensor
    """`biases.bias_P`. Under `max_candidates`: -inf for an id that is not sampled; for a sampled one the bias minus the
    log of its sampling probability."""

    sampling_bias_P: Tensor | None = None
    """Replaces the bias of an output's own target where a generator samples from the softmax, by the log of the id's
    mean weight among the other targets; None: nothing samples from it."""

    def candidates(self, target_ids_N: Tensor, weight_N: Tensor | None = None) -> Candidates:
        """The candidates for the group's targets in one micro-batch: shared ones and all targets, by increasing id.
        `weight_N`: the weights of their losses. O(N log P + P)."""
        index_N = torch.searchsorted(self.ids_P, target_ids_N)
        is_candidate_P = self.shared_bias_P > -torch.inf
        is_candidate_P[index_N] = True
        target_N = (is_candidate_P.cumsum(0) - 1)[index_N]
        ids_U, bias_U = self.ids_P[is_candidate_P], self.shared_bias_P[is_candidate_P]
        as_target_bias_U = self.biases.as_target_bias_P[is_candidate_P]
        sampling_bias_U = None if self.sampling_bias_P is None else self.sampling_bias_P[is_candidate_P]
        return Candidates(
            ids_U,
            bias_U,
            target_N,
            None if torch.equal(bias_U, as_target_bias_U) else as_target_bias_U,
            self.biases.target_logit_has_bias,
            weight_N,
            sampling_bias_U,
        )


class HeadlessObjective:
    """Classifies each output among the input embeddings of its candidate group's targets.

    `token_counts_V`: how often each id occurs in the training text, if the config needs it.
    """

    def __init__(self, config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None = None) -> None:
        self._config, self._samples_tokens = config, config.auxiliary_or_empty().samples_tokens
        self._log_q_V, self._log_r_V = None, None
        counts_V = token_counts_V if token_counts_V is not None and token_counts_V.any() else None
        setting = config.token_counts_needed_by()
        if setting is not None and counts_V is None:
            rule = "have a dataset with token counts (its .json file)"
            hint = "preprocess the text again, or change the objective"
            raise ConfigError(f"objective.{setting}", rule, got=attrgetter(setting)(config), hint=hint)
        if counts_V is not None and (setting is not None or self._samples_tokens):
            self._log_q_V = log_unigram(counts_V, vocab_size)
        if config.negatives:
            self._log_r_V = log_negative_probabilities(config, vocab_size, token_counts_V)
            self._cumulative_r_V = self._log_r_V.exp().double().cumsum(0)

    def candidate_set(self, target_ids_G: Tensor, seed: int = 0) -> SharedCandidateSet:
        """The candidate set of a group with these targets; `seed`: of its random negatives and subsample. O((G + M) log
        (G + M) + M log V), on the CPU."""
        config, generator, ids = self._config, torch.Generator().manual_seed(seed), target_ids_G
        if self._log_r_V is not None:
            ids = torch.cat([ids, sample_ids(self._cumulative_r_V, config.negatives, generator)])
        ids_P, counts_P = torch.unique(ids, return_counts=True)
        log_r_P = None if self._log_r_V is None else self._log_r_V[ids_P]
        log_pi_P = None
        if config.bias == "corrected" and self._log_q_V is not None:
            log_pi_P = log_inclusion(self._log_q_V[ids_P], target_ids_G.numel(), log_r_P, config.negatives)
        biases = compute_biases(config.bias, counts_P, log_pi_P)
        shared_bias_P = self._subsampled_bias(biases.bias_P, generator)
        if not self._samples_tokens:
            return SharedCandidateSet(ids_P, biases, shared_bias_P)
        if self._log_q_V is None:
            sampling_bias_P = leave_one_out_bias(config.bias, counts_P, log_pi_P) + shared_bias_P - biases.bias_P
        else:
            num_others = target_ids_G.numel() - 1
            sampling_bias_P = log_mean_weight(config.bias, self._log_q_V[ids_P], num_others, log_r_P, config.negatives)
            sampling_bias_P = sampling_bias_P if log_pi_P is None else sampling_bias_P - log_pi_P
        return SharedCandidateSet(ids_P, biases, shared_bias_P, sampling_bias_P)

    def _subsampled_bias(self, bias_P: Tensor, generator: torch.Generator) -> Tensor:
        """[P]: the biases of a sample of `max_candidates` ids, each weight divided by its sampling probability; -inf
        for the others."""
        max_candidates = self._config.max_candidates
        if max_candidates is None or len(bias_P) <= max_candidates:
            return bias_P
        probabilities_P = inclusion_probabilities(bias_P.exp(), max_candidates)
        is_sampled_P = systematic_sample(probabilities_P, generator)
        return torch.where(is_sampled_P, bias_P - probabilities_P.log(), -torch.inf)


class VanillaObjective:
    """Classifies each output among the whole vocabulary."""

    def candidate_set(self, target_ids_G: Tensor, seed: int = 0) -> VanillaObjective:
        return self

    def candidates(self, target_ids_N: Tensor, weight_N: Tensor | None = None) -> Candidates:
        return all_rows_as_candidates(target_ids_N, weight_N=weight_N)


Objective = HeadlessObjective | VanillaObjective
"""Selects the candidates that outputs are scored against (CPU tensors; called in the prefetching thread)."""

CandidateSet = SharedCandidateSet | VanillaObjective
"""Makes the candidates for the targets of one candidate group."""


def build_objective(config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None = None) -> Objective:
    """The objective of `config`; ConfigError if it needs token counts of the training text and there are none."""
    return VanillaObjective() if config.name == "vanilla" else HeadlessObjective(config, vocab_size, token_counts_V)


def cwt_loss(outputs_ND: Tensor, target_ids_N: Tensor, embedding_VD: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Contrastive Weight Tying, the whole objective: `mean_i [ logsumexp_k(o_i.e(x_k) / T) - o_i.e(x_i) / T ]`.

    outputs_ND: final hidden states, in any float type; also [B, T, D]. target_ids_N: integer ids of their targets, one
    for each output, [N] or [B, T]; an output whose target is -100 is ignored.
    embedding_VD: the *input* embedding table; it gets gradient as positives and as negatives.
    Returns the mean over N in float32 (float64 for float64 inputs); 0 for N = 0, connected to the inputs.

    ArgumentError (a ValueError) for invalid arguments. An id outside the table raises it on CPUs; on GPUs, where a
    check would synchronize, and in a compiled function it fails a device-side assertion. RuntimeError where second
    derivatives are requested.

    Equal to the N x N form of the paper (section 3, with the log that is missing in its equation but present in its
    code), but over the U unique targets with bias log(count): time O(N U D), extra memory O((N + U) D).
    Single process: the negatives are these N targets.
    """
    _validate_arguments(outputs_ND, target_ids_N, embedding_VD, temperature)
    outputs_ND, target_ids_N = outputs_ND.flatten(0, -2), target_ids_N.flatten().long()
    if target_ids_N.numel() == 0:
        dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, embedding_VD.dtype), torch.float32)
        return outputs_ND.to(dtype).sum() + embedding_VD[:0].to(dtype).sum()
    candidates = unique_candidates(target_ids_N)
    count: Tensor | int = target_ids_N.numel()
    has_target_N = target_ids_N != NO_TARGET
    if not _can_read_values(target_ids_N) or not has_target_N.all():
        candidates, count = _mask_missing_targets(candidates, has_target_N), has_target_N.sum().clamp(min=1)
        outputs_ND = outputs_ND.masked_fill(~has_target_N[:, None], 0)  # outputs of padding may be NaN
    assert candidates.ids_U is not None
    rows_UD = embedding_VD.index_select(0, candidates.ids_U)
    return candidate_loss(outputs_ND, rows_UD, candidates, Dot(float(temperature))) / count


def _mask_missing_targets(candidates: Candidates, has_target_N: Tensor) -> Candidates:
    """The same candidates with -100 removed, and weight 0 for outputs without a target. Shapes do not change, so that
    the device is not synchronized. -100 is the first of the increasing candidate ids; if it is the only one, it is not
    removed.
    """
    ids_U, bias_U = candidates.ids_U, candidates.bias_U
    assert ids_U is not None
    assert bias_U is not None
    last_index = len(ids_U) - 1
    is_removed_U = (ids_U == NO_TARGET) & (torch.arange(len(ids_U), device=ids_U.device) < last_index)
    ids_U = torch.where(ids_U == NO_TARGET, ids_U[-1:].where(ids_U[-1:] != NO_TARGET, 0), ids_U)
    target_N = candidates.target_N.where(has_target_N, last_index)
    return Candidates(ids_U, bias_U.masked_fill(is_removed_U, -torch.inf), target_N, weight_N=has_target_N.float())


def _can_read_values(ids: Tensor) -> bool:
    """Whether values can be read without a device synchronization or a graph break."""
    return ids.device.type == "cpu" and not torch.compiler.is_compiling()


def _validate_arguments(outputs: Tensor, target_ids: Tensor, embedding: Tensor, temperature: float) -> None:
    """Raises ArgumentError for invalid or inconsistent arguments of `cwt_loss`."""
    tensors = {"outputs_ND": outputs, "target_ids_N": target_ids, "embedding_VD": embedding}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            hint = "give its `.weight`" if isinstance(value, nn.Module) else ""
            raise ArgumentError(name, "be a tensor", got=f"a {type(value).__name__}", hint=hint)
        if value is target_ids and (value.is_floating_point() or value.dtype == torch.bool):
            raise ArgumentError(name, "hold integers", got=value.dtype)
        if value is not target_ids and not value.is_floating_point():
            raise ArgumentError(name, "hold floating-point numbers", got=value.dtype)
    for name, value in tensors.items():
        if value.device != embedding.device:
            rule = f"be on the device of embedding_VD ({embedding.device})"
            raise ArgumentError(name, rule, got=f"on {value.device}")
    if embedding.ndim != 2:
        raise ArgumentError("embedding_VD", "be a table, [V, D]", got=list(embedding.shape))
    if outputs.ndim < 2 or outputs.shape[-1] != embedding.shape[1]:
        rule = f"be as wide as embedding_VD, [N, {embedding.shape[1]}]"
        raise ArgumentError("outputs_ND", rule, got=list(outputs.shape))
    if target_ids.shape != outputs.shape[:-1]:
        rule = f"have a target for each output, {list(outputs.shape[:-1])}"
        hint = "shift both alike, and mark outputs without a target by -100"
        raise ArgumentError("target_ids_N", rule, got=list(target_ids.shape), hint=hint)
    if not isinstance(temperature, Real) or isinstance(temperature, bool) or not 1e-37 < temperature < 1e37:
        got = temperature if isinstance(temperature, Real) else f"a {type(temperature).__name__}"
        raise ArgumentError("temperature", "be a positive number", got=got)
    if _can_read_values(target_ids):
        is_invalid = ((target_ids < 0) & (target_ids != NO_TARGET)) | (target_ids >= len(embedding))
        if is_invalid.any():
            rule = f"be ids below {len(embedding):,} (or {NO_TARGET}: no target)"
            got = f"{int(target_ids[is_invalid][0])} at {int(is_invalid.sum()):,} of them"
            raise ArgumentError("target_ids_N", rule, got=got)
