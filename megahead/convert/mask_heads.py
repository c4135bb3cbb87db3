"""The head an exported encoder gets: `BertForMaskedLM`'s transform, norm and bias before and after the embedding.

That head computes W norm(gelu(dense h)) + bias. A vanilla encoder has trained all of it. A headless one has none, but
its outputs h = w * x + b come out of a layer norm, whose x has mean 0 and variance 1; so the head can hold `E h / T +
log q` exactly: dense = diag(1/w) with bias -b/w + B gives x + B, which GELU leaves as it is where B is large; the norm
takes B off again and, with (w, b) / T as weight and bias, gives h / T; and the decoder's bias is log q.

V vocabulary, D features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megahead.errors import CheckpointError

PADDING_BIAS = -1e4
"""The bias of padding rows, where they are kept, so that they get no probability."""

_LINEAR_FROM = 6.0  # GELU(x) is x, within 1e-8 of it, from here on


def identity_transform(
    norm_weight_D: Tensor, norm_bias_D: Tensor, bias_V: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Tensors of a head that gives `E h / T + bias_V` behind a layer norm with this weight and bias; by our names.

    CheckpointError if a weight is exactly 0.
    """
    weight_D, shift_D = norm_weight_D.double(), norm_bias_D.double()
    zeros = int((weight_D == 0).sum())
    if zeros:
        raise CheckpointError(
            f"an encoder's head cannot be exported: {zeros} of the last norm's {len(weight_D)} weights are exactly 0; "
            "export with --head none."
        )
    lift = math.sqrt(len(weight_D)) + _LINEAR_FROM  # no normed feature is below -sqrt(D)
    return {
        "mask_head.dense.weight": torch.diag(1 / weight_D),
        "mask_head.dense.bias": lift - shift_D / weight_D,
        "mask_head.norm.weight": weight_D / temperature,
        "mask_head.norm.bias": shift_D / temperature,
        "mask_head.bias": bias_V,
    }


def trained_transform(stored: Mapping[str, Tensor], vocab_size: int, temperature: float) -> dict[str, Tensor]:
    """The tensors that a vanilla encoder trained, with its temperature in the norm; `stored`: by our names."""
    bias_V = stored["mask_head.bias"].clone()
    bias_V[vocab_size:] = PADDING_BIAS
    scaled = {f"mask_head.norm.{leaf}": stored[f"mask_head.norm.{leaf}"] / temperature for leaf in ("weight", "bias")}
    return {**stored, **scaled, "mask_head.bias": bias_V}
