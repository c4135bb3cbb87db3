"""Candidates: the rows of the embedding that outputs are scored against, given as ids and biases; made on the CPU,
before the forward pass.

N targets of a micro-batch (or of its part that is in one candidate group), U candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Candidates:
    """Which rows of the table compete in the softmax of each output, and with which biases."""

    ids_U: Tensor | None
    """int64 token ids, each once; None: all rows of the output matrix, in order."""

    bias_U: Tensor | None
    """Added to the candidates' scores; None (only for all rows): zeros. float64, rounded to the scores' type when used.
    -inf removes a candidate, except for the outputs whose target it is."""

    positive_N: Tensor
    """int64: the index of each output's positive (its target) among the candidates."""

    positive_bias_U: Tensor | None = None
    """Replaces `bias_U` for outputs whose positive the candidate is; None: `bias_U` for them too."""

    subtracts_positive_bias: bool = False
    """Whether the loss has the positive's bias in the numerator, too, as an ordinary softmax has. Only such a bias may
    have a gradient: that of the softmax, in which nothing must be added up by ids."""

    weight_N: Tensor | None = None
    """How often each output's loss counts; None: once."""

    drawn_bias_U: Tensor | None = None
    """Replaces `bias_U` of an output's positive where tokens are drawn, which must not know the target: log of what the
    id weighs on average among the other targets; None: `bias_U`."""

    def weighed(self, values_N: Tensor) -> Tensor:
        """[N], each output's value as often as it counts."""
        return values_N if self.weight_N is None else values_N * self.weight_N.to(values_N.dtype)

    def numerator(self, positive_n: Tensor, biased_n: Tensor) -> Tensor:
        """What the loss subtracts of some outputs' positives: their score without bias, or the one with it."""
        return biased_n if self.subtracts_positive_bias else positive_n

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on `device`; copies from pinned memory do not wait."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Candidates:
        """The same in page-locked memory, from which a CUDA device copies in the background."""
        return self._mapped(Tensor.pin_memory)

    def padded(self, multiple: int) -> Candidates:
        """Pads the number of candidates to a multiple, so that shapes repeat; the added ones are the first again, so
        that no more rows of a table are used, with the bias -inf."""
        if self.ids_U is None or self.bias_U is None:
            return self
        missing = -self.ids_U.numel() % multiple
        return replace(
            self,
            ids_U=torch.cat([self.ids_U, self.ids_U[:1].expand(missing)]),
            bias_U=F.pad(self.bias_U, (0, missing), value=-torch.inf),
            positive_bias_U=None if self.positive_bias_U is None else F.pad(self.positive_bias_U, (0, missing)),
            drawn_bias_U=None if self.drawn_bias_U is None else F.pad(self.drawn_bias_U, (0, missing)),
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Candidates:
        """The same with `change` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


def unique_candidates(target_ids_N: Tensor) -> Candidates:
    """The targets themselves, each once, with the bias log(count): the same as the paper's sum over all N targets.

    sum_k exp(o.e(x_k)) over N targets = sum_u exp(o.e_u + log c_u) over the U <= N unique ones. O(N log N).
    """
    ids_U, positive_N, counts_U = torch.unique(target_ids_N, return_inverse=True, return_counts=True)
    return Candidates(ids_U, counts_U.double().log(), positive_N)


def vocabulary_candidates(
    target_ids_N: Tensor, bias_V: Tensor | None = None, weight_N: Tensor | None = None
) -> Candidates:
    """The whole vocabulary: the ordinary language-model softmax."""
    return Candidates(None, bias_V, target_ids_N, weight_N=weight_N)
