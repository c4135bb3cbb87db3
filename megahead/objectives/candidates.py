"""The rows an output is scored against, as ids and biases: made on the CPU, before the forward pass.

Shapes: N targets of a micro-batch, U candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Which rows of the table compete in the softmax of a micro-batch."""

    ids_U: Tensor | None
    """int64 token ids, each once; None stands for all rows of the output matrix, in order."""

    bias_U: Tensor | None
    """float64 (rounded to the type of the scores when used), added to them; None stands for zeros."""

    own_N: Tensor
    """int64, the place of each target among the candidates."""

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on `device`; copies from pinned memory do not wait."""
        ids = None if self.ids_U is None else self.ids_U.to(device, non_blocking=True)
        bias = None if self.bias_U is None else self.bias_U.to(device, non_blocking=True)
        return Candidates(ids, bias, self.own_N.to(device, non_blocking=True))


def unique_candidates(target_ids_N: Tensor) -> Candidates:
    """The targets themselves, each once, with the bias log(count): the paper's sum over all N targets.

    sum_k exp(o.e(x_k)) over N targets = sum_u exp(o.e_u + log c_u) over the U <= N unique ones. O(N log N).
    """
    ids_U, own_N, counts_U = torch.unique(target_ids_N, return_inverse=True, return_counts=True)
    return Candidates(ids_U, counts_U.double().log(), own_N)


def vocabulary_candidates(target_ids_N: Tensor) -> Candidates:
    """The whole vocabulary without bias: the ordinary language-model softmax."""
    return Candidates(None, None, target_ids_N)
