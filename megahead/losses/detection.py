"""Replaced-token detection: of each token, whether it is the text's own or was put there by a generator.

P judged tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

Number = TypeVar("Number", Tensor, float)


class DetectionSums(NamedTuple, Generic[Number]):
    """How well P tokens are told apart, summed up. A tuple, since ZeRO-3 looks for tensors in outputs."""

    loss: Number
    """In nats."""

    judged: Number
    """P."""

    replaced: Number
    """How many of them are not the text's own."""

    found: Number
    """How many of these were taken for such."""

    kept: Number
    """How many of the others were taken for the text's own."""


@dataclass(frozen=True)
class DetectionResult:
    """The same as means and shares."""

    loss: float
    """Mean over the judged tokens, in nats."""

    replaced: float
    found: float
    """Share of the replaced ones."""

    kept: float
    """Share of the others."""

    @staticmethod
    def of(sums: DetectionSums[float]) -> DetectionResult:
        """0 where there is nothing to have a share of."""
        judged, replaced, others = (max(n, 1) for n in (sums.judged, sums.replaced, sums.judged - sums.replaced))
        return DetectionResult(sums.loss / judged, sums.replaced / judged, sums.found / replaced, sums.kept / others)


def detection_sums(logits_P: Tensor, replaced_P: Tensor) -> DetectionSums[Tensor]:
    """Of tokens that are replaced (bool) with log-odds of `logits_P`; the loss is binary cross-entropy, with a
    gradient. All are scalar tensors; for P = 0 the loss is 0, connected to its inputs."""
    logits_P = logits_P.to(torch.promote_types(logits_P.dtype, torch.float32))
    loss = F.binary_cross_entropy_with_logits(logits_P, replaced_P.to(logits_P.dtype), reduction="sum")
    said_P = logits_P > 0
    judged = torch.full((), len(said_P), device=said_P.device)  # by the device itself, which nothing waits for
    return DetectionSums(loss, judged, replaced_P.sum(), (said_P & replaced_P).sum(), (~said_P & ~replaced_P).sum())
