"""The objectives. Each is a rule for the candidates; the softmax over them is the same for all.

Headless: Contrastive Weight Tying, Godey, de la Clergerie, Sagot, "Headless Language Models", arXiv 2309.08351.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megahead.config import ObjectiveConfig
from megahead.objectives.candidates import Candidates, unique_candidates, vocabulary_candidates
from megahead.objectives.softmax import candidate_loss


class Objective(Protocol):
    """Chooses what each output is scored against."""

    temperature: float

    def candidates(self, target_ids_N: Tensor) -> Candidates:
        """The candidates of one group of targets (CPU tensors; called ahead of time, in a background thread)."""
        ...


class Headless:
    """Pick one's own target's input embedding among those of the group's targets."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def candidates(self, target_ids_N: Tensor) -> Candidates:
        return unique_candidates(target_ids_N)


class Vanilla:
    """Pick the target among the whole vocabulary."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def candidates(self, target_ids_N: Tensor) -> Candidates:
        return vocabulary_candidates(target_ids_N)


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that the run asks for."""
    if config.name == "vanilla":
        return Vanilla(config.temperature)
    return Headless(config.temperature)


def cwt_loss(outputs_ND: Tensor, target_ids_N: Tensor, embedding_VD: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Contrastive Weight Tying, the whole objective: `mean_i [ logsumexp_k(o_i.e(x_k) / T) - o_i.e(x_i) / T ]`.

    outputs_ND: final hidden states, in any float type. target_ids_N: int64 ids of their targets.
    embedding_VD: the *input* embedding table; it gets gradient as positives and as negatives.
    Returns the mean over N in float32 (float64 for float64 inputs); 0 for N = 0, connected to the inputs.

    Equal to the N x N form of the paper (section 3, with the log that its equation lost and its code has),
    but over the U unique targets with bias log(count): time O(N U D), extra memory O((N + U) D).
    Single process: the negatives are the N targets given.
    """
    candidates = unique_candidates(target_ids_N)
    assert candidates.ids_U is not None
    rows_UD = embedding_VD.index_select(0, candidates.ids_U)
    if target_ids_N.numel() == 0:
        return 0.0 * (outputs_ND.float().sum() + embedding_VD.float().sum())
    total = candidate_loss(outputs_ND, rows_UD, candidates.own_N, candidates.bias_U, temperature)
    return total / target_ids_N.numel()
