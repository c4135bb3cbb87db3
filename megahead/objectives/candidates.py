"""The rows an output is scored against, as ids and biases: made on the CPU, before the forward pass.

Shapes: N targets of a micro-batch (or of its part that is one group), U candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Candidates:
    """Which rows of the table compete in the softmax of each output."""

    ids_U: Tensor | None
    """int64 token ids, each once; None stands for all rows of the output matrix, in order."""

    bias_U: Tensor | None
    """float64 (rounded to the type of the scores when used), added to them; None stands for zeros.
    -inf for a row that only the outputs compete with whose own it is."""

    positive_N: Tensor
    """int64, the place of each target among the candidates."""

    positive_bias_U: Tensor | None = None
    """What is added to a row's score for outputs whose own it is; None: the same as for all others."""

    constant: float = 0.0
    """Added to the summed loss: minus the own biases, for objectives that report them."""

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on `device`; copies from pinned memory do not wait."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        positive_N = self.positive_N.to(device, non_blocking=True)
        return Candidates(move(self.ids_U), move(self.bias_U), positive_N, move(self.positive_bias_U), self.constant)

    def pinned(self) -> Candidates:
        """The same in page-locked memory, from which a CUDA device copies while the host goes on."""

        def pin(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.pin_memory()

        return Candidates(
            pin(self.ids_U), pin(self.bias_U), self.positive_N.pin_memory(), pin(self.positive_bias_U), self.constant
        )

    def padded(self, multiple: int) -> Candidates:
        """As many rows as the next multiple, those added with the bias -inf: fewer shapes for a device to meet."""
        missing = 0 if self.ids_U is None else -self.ids_U.numel() % multiple
        if self.ids_U is None or missing == 0:
            return self
        bias_U = torch.zeros(self.ids_U.numel(), dtype=torch.float64) if self.bias_U is None else self.bias_U
        positive_bias_U = None if self.positive_bias_U is None else F.pad(self.positive_bias_U, (0, missing))
        ids_U, bias_U = F.pad(self.ids_U, (0, missing)), F.pad(bias_U, (0, missing), value=-torch.inf)
        return Candidates(ids_U, bias_U, self.positive_N, positive_bias_U, self.constant)


def unique_candidates(target_ids_N: Tensor) -> Candidates:
    """The targets themselves, each once, with the bias log(count): the paper's sum over all N targets.

    sum_k exp(o.e(x_k)) over N targets = sum_u exp(o.e_u + log c_u) over the U <= N unique ones. O(N log N).
    """
    ids_U, positive_N, counts_U = torch.unique(target_ids_N, return_inverse=True, return_counts=True)
    return Candidates(ids_U, counts_U.double().log(), positive_N)


def vocabulary_candidates(target_ids_N: Tensor) -> Candidates:
    """The whole vocabulary without bias: the ordinary language-model softmax."""
    return Candidates(None, None, target_ids_N)
