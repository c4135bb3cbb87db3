"""The objectives. Each is a rule for the candidates; the softmax over them is the same for all.

Headless: Contrastive Weight Tying, Godey, de la Clergerie, Sagot, "Headless Language Models", arXiv 2309.08351.
N targets of a micro-batch, G targets of its candidate group, M random negatives, P different ids among G and M (the
group's candidate set), U candidates, V vocabulary. q: distribution of targets, r: of random negatives, pi: probability
of being a candidate (`log_inclusion`). Nothing here costs O(V) per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from megahead.config.objective import ObjectiveConfig
from megahead.errors import ArgumentError, ConfigError
from megahead.losses.candidates import (
    Candidates,
    Weighting,
    compute_weighting,
    draw_ids,
    inclusion_probabilities,
    log_inclusion,
    log_mean_weight,
    log_negatives,
    log_unigram,
    systematic_sample,
    unique_candidates,
    vocabulary_candidates,
    weighting_without_one,
)
from megahead.losses.scores import Dot
from megahead.losses.softmax import candidate_loss

NO_TARGET = -100
"""A target id, to Hugging Face and torch, of an output that has none."""


class CandidateSet(Protocol):
    """Makes the candidates for the targets of one candidate group."""

    def candidates(self, target_ids_N: Tensor, weight_N: Tensor | None = None) -> Candidates:
        """The candidates for the group's targets in one micro-batch; `weight_N`: how often each one's loss counts."""
        ...


class Objective(Protocol):
    """Chooses what each output is scored against (CPU tensors; called ahead of time, in a background thread)."""

    def candidate_set(self, target_ids_G: Tensor, seed: int = 0) -> CandidateSet:
        """The candidate set of a group with these targets. `seed` decides what is drawn, and belongs to the group."""
        ...


@dataclass(frozen=True)
class SharedCandidateSet:
    """Candidates that all outputs of a group share, and the biases of targets, which need not be shared."""

    ids_P: Tensor
    """int64, increasing: all targets of the group and all random negatives."""

    weighting: Weighting
    """Log-weights of candidates in the denominator; some objectives put the target's in the numerator too."""

    shared_bias_P: Tensor
    """The weighting's bias. Under `max_candidates`: -inf for an id that was not sampled; for one that was, the bias
    minus the log of its probability of being sampled."""

    drawn_bias_P: Tensor | None = None
    """The bias of a target where tokens are drawn, if some are (`Candidates.drawn_bias_U`)."""

    def candidates(self, target_ids_N: Tensor, weight_N: Tensor | None = None) -> Candidates:
        """The shared candidates, and the targets that are not shared; ids in increasing order. O(N log P + P)."""
        place_N = torch.searchsorted(self.ids_P, target_ids_N)
        member_P = self.shared_bias_P > -torch.inf
        member_P[place_N] = True
        target_N = (member_P.cumsum(0) - 1)[place_N]
        ids_U, bias_U = self.ids_P[member_P], self.shared_bias_P[member_P]
        target_bias_U = self.weighting.target_bias_P[member_P]
        same = torch.equal(bias_U, target_bias_U)
        drawn_bias_U = None if self.drawn_bias_P is None else self.drawn_bias_P[member_P]
        return Candidates(
            ids_U,
            bias_U,
            target_N,
            None if same else target_bias_U,
            self.weighting.subtracts_target_bias,
            weight_N,
            drawn_bias_U,
        )


class Headless:
    """Each output picks its target's input embedding among those of its candidate group's targets.

    `token_counts_V`: how often each id occurs in the training text, if the config needs it.
    """

    def __init__(self, config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None = None) -> None:
        self._config, auxiliary = config, config.auxiliary()
        self._draws_tokens = auxiliary is not None and auxiliary.samples_tokens
        self._log_q_V, self._log_r_V = None, None
        counts_V = token_counts_V if token_counts_V is not None and token_counts_V.any() else None
        needing = config.token_counts_needed_by()
        if needing is not None and counts_V is None:
            raise ConfigError(
                f"objective.{needing}",
                "have a dataset with token counts (its .json file)",
                got=attrgetter(needing)(config),
                hint="preprocess the text again, or change the objective",
            )
        if counts_V is not None and (needing is not None or self._draws_tokens):
            self._log_q_V = log_unigram(counts_V, vocab_size)
        if config.negatives:
            self._log_r_V = log_negatives(config, vocab_size, token_counts_V)
            self._cumulative_r_V = self._log_r_V.exp().double().cumsum(0)

    def candidate_set(self, target_ids_G: Tensor, seed: int = 0) -> SharedCandidateSet:
        """O((G + M) log (G + M) + M log V), on the CPU."""
        config, generator, ids = self._config, torch.Generator().manual_seed(seed), target_ids_G
        if self._log_r_V is not None:
            ids = torch.cat([ids, draw_ids(self._cumulative_r_V, config.negatives, generator)])
        ids_P, multiplicity_P = torch.unique(ids, return_counts=True)
        log_r_P = None if self._log_r_V is None else self._log_r_V[ids_P]
        log_pi_P = None
        if config.bias == "corrected" and self._log_q_V is not None:
            log_pi_P = log_inclusion(self._log_q_V[ids_P], target_ids_G.numel(), log_r_P, config.negatives)
        weighting = compute_weighting(config.bias, multiplicity_P, log_pi_P)
        shared_bias_P = self._capped(weighting.bias_P, generator)
        if not self._draws_tokens:
            return SharedCandidateSet(ids_P, weighting, shared_bias_P)
        if self._log_q_V is None:
            drawn_bias_P = (
                weighting_without_one(config.bias, multiplicity_P, log_pi_P) + shared_bias_P - weighting.bias_P
            )
        else:
            others = target_ids_G.numel() - 1
            drawn_bias_P = log_mean_weight(config.bias, self._log_q_V[ids_P], others, log_r_P, config.negatives)
            drawn_bias_P = drawn_bias_P if log_pi_P is None else drawn_bias_P - log_pi_P
        return SharedCandidateSet(ids_P, weighting, shared_bias_P, drawn_bias_P)

    def _capped(self, bias_P: Tensor, generator: torch.Generator) -> Tensor:
        """Biases of a sample of at most `max_candidates`: each weight divided by its probability of being sampled."""
        most = self._config.max_candidates
        if most is None or len(bias_P) <= most:
            return bias_P
        probabilities_P = inclusion_probabilities(bias_P.exp(), most)
        chosen_P = systematic_sample(probabilities_P, generator)
        return torch.where(chosen_P, bias_P - probabilities_P.log(), -torch.inf)


class Vanilla:
    """Pick the target among the whole vocabulary."""

    def candidate_set(self, target_ids_G: Tensor, seed: int = 0) -> Vanilla:
        return self

    def candidates(self, target_ids_N: Tensor, weight_N: Tensor | None = None) -> Candidates:
        return vocabulary_candidates(target_ids_N, weight_N=weight_N)


def build_objective(config: ObjectiveConfig, vocab_size: int, token_counts_V: Tensor | None = None) -> Objective:
    """The objective of `config`; ConfigError if it needs token counts of the training text, but has none."""
    return Vanilla() if config.name == "vanilla" else Headless(config, vocab_size, token_counts_V)


def cwt_loss(outputs_ND: Tensor, target_ids_N: Tensor, embedding_VD: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Contrastive Weight Tying, the whole objective: `mean_i [ logsumexp_k(o_i.e(x_k) / T) - o_i.e(x_i) / T ]`.

    outputs_ND: final hidden states, in any float type; also [B, T, D]. target_ids_N: integer ids of their targets, one
    for each output, [N] or [B, T]; an output whose target is -100 is left out.
    embedding_VD: the *input* embedding table; it gets gradient as positives and as negatives.
    Returns the mean over N in float32 (float64 for float64 inputs); 0 for N = 0, connected to the inputs.

    ArgumentError (a ValueError) for arguments that do not fit. An id that the table lacks is such on CPUs; on GPUs,
    where looking would wait for the device, it is a device-side assertion, and so it is in a compiled function.
    Has first derivatives only; asking for second ones is a RuntimeError.

    Equal to the N x N form of the paper (section 3, with the log that its equation lost and its code has),
    but over the U unique targets with bias log(count): time O(N U D), extra memory O((N + U) D).
    Single process: the negatives are the N targets given.
    """
    _require_fitting(outputs_ND, target_ids_N, embedding_VD, temperature)
    outputs_ND, target_ids_N = outputs_ND.flatten(0, -2), target_ids_N.flatten().long()
    if target_ids_N.numel() == 0:
        dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, embedding_VD.dtype), torch.float32)
        return outputs_ND.to(dtype).sum() + embedding_VD[:0].to(dtype).sum()
    candidates = unique_candidates(target_ids_N)
    count: Tensor | int = target_ids_N.numel()
    chosen_N = target_ids_N != NO_TARGET
    if not _can_look(target_ids_N) or not chosen_N.all():
        candidates, count = _among_chosen(candidates, chosen_N), chosen_N.sum().clamp(min=1)
        outputs_ND = outputs_ND.masked_fill(~chosen_N[:, None], 0)  # those of padding may be NaN
    assert candidates.ids_U is not None
    rows_UD = embedding_VD.index_select(0, candidates.ids_U)
    return candidate_loss(outputs_ND, rows_UD, candidates, Dot(float(temperature))) / count


def _among_chosen(candidates: Candidates, chosen_N: Tensor) -> Candidates:
    """The same without the candidate -100, and with the loss of outputs that are not chosen counting 0; shapes stay, so
    that nothing waits for a device. -100 is the first of the candidates, which increase; where it is alone, it stays.
    """
    ids_U, bias_U = candidates.ids_U, candidates.bias_U
    assert ids_U is not None
    assert bias_U is not None
    last = len(ids_U) - 1
    removed_U = (ids_U == NO_TARGET) & (torch.arange(len(ids_U), device=ids_U.device) < last)
    ids_U = torch.where(ids_U == NO_TARGET, ids_U[-1:].where(ids_U[-1:] != NO_TARGET, 0), ids_U)
    target_N = candidates.target_N.where(chosen_N, last)
    return Candidates(ids_U, bias_U.masked_fill(removed_U, -torch.inf), target_N, weight_N=chosen_N.float())


def _can_look(ids: Tensor) -> bool:
    """Whether values can be looked at without a wait for a device, or a break of a graph."""
    return ids.device.type == "cpu" and not torch.compiler.is_compiling()


def _require_fitting(outputs: Tensor, target_ids: Tensor, embedding: Tensor, temperature: float) -> None:
    """ArgumentError for what is no argument of `cwt_loss`, or does not fit the others."""
    named = {"outputs_ND": outputs, "target_ids_N": target_ids, "embedding_VD": embedding}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            hint = "give its `.weight`" if isinstance(value, nn.Module) else ""
            raise ArgumentError(name, "be a tensor", got=f"a {type(value).__name__}", hint=hint)
        if value is target_ids and (value.is_floating_point() or value.dtype == torch.bool):
            raise ArgumentError(name, "hold integers", got=value.dtype)
        if value is not target_ids and not value.is_floating_point():
            raise ArgumentError(name, "hold floating-point numbers", got=value.dtype)
    for name, value in named.items():
        if value.device != embedding.device:
            raise ArgumentError(
                name, f"be on the device of embedding_VD ({embedding.device})", got=f"on {value.device}"
            )
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
    if _can_look(target_ids):
        wrong = ((target_ids < 0) & (target_ids != NO_TARGET)) | (target_ids >= len(embedding))
        if wrong.any():
            rule = f"be ids below {len(embedding):,} (or {NO_TARGET}: no target)"
            raise ArgumentError(
                "target_ids_N", rule, got=f"{int(target_ids[wrong][0])} at {int(wrong.sum()):,} of them"
            )
