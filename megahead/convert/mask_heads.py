"""The head an exported encoder gets: the transform, norm and bias of masked language models around the embedding.

That head computes W norm(gelu(dense h)) + bias. A vanilla encoder has trained all of it. A headless one has none, but
its outputs h = w * x + b come out of a layer norm, whose x has mean 0 and variance 1; so the head can hold `E h / T +
log q`: dense = diag(1/w) with bias -b/w + B gives x + B, which GELU leaves as it is where B is large; the norm takes B
off again and, with (w, b) / T as weight and bias, gives h / T; and the decoder's bias is log q.

Norms add eps to a variance. Where v is that of the last norm's input, x has v / (v + eps), and the head's norm adds eps
once more; with sqrt(1 + eps) in its weight h is off by a share of eps / 2v: 5e-6 where v is 1 and eps 1e-5.

V vocabulary, D features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megahead.errors import CheckpointError

PADDING_BIAS = -1e4
"""The bias of padding rows, where they are kept, so that they get no probability."""

_LINEAR_FROM = 6.0  # GELU(x) is x, within 1e-8 of it, from here on


class LastNorm(NamedTuple):
    """The layer norm that a headless encoder's outputs come out of."""

    weight_D: Tensor
    bias_D: Tensor | None
    eps: float


def identity_transform(norm: LastNorm, bias_V: Tensor, temperature: float) -> dict[str, Tensor]:
    """Tensors of a head that gives `E h / T + bias_V` behind `norm`; by our names.

    The head's own norm has the same eps, and a bias where the last one has.
    CheckpointError if a weight is exactly 0.
    """
    weight_D = norm.weight_D.double()
    zeros = int((weight_D == 0).sum())
    if zeros:
        raise CheckpointError(
            f"an encoder's head cannot be exported: {zeros} of the last norm's {len(weight_D)} weights are exactly 0; "
            "export with --head none."
        )
    lift = math.sqrt(len(weight_D)) + _LINEAR_FROM  # no normed feature is below -sqrt(D)
    shift_D = torch.zeros_like(weight_D) if norm.bias_D is None else norm.bias_D.double()
    transform = {
        "mask_head.dense.weight": torch.diag(1 / weight_D),
        "mask_head.dense.bias": lift - shift_D / weight_D,
        "mask_head.norm.weight": math.sqrt(1 + norm.eps) * weight_D / temperature,
        "mask_head.bias": bias_V,
    }
    return transform if norm.bias_D is None else transform | {"mask_head.norm.bias": shift_D / temperature}


def trained_transform(stored: Mapping[str, Tensor], vocab_size: int, temperature: float) -> dict[str, Tensor]:
    """The tensors that a vanilla encoder trained, with its temperature in the norm; `stored`: by our names."""
    bias_V = stored["mask_head.bias"].clone()
    bias_V[vocab_size:] = PADDING_BIAS
    scaled = {name: stored[name] / temperature for name in stored if name.startswith("mask_head.norm.")}
    return {**stored, **scaled, "mask_head.bias": bias_V}
