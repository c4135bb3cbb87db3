"""Layer normalization (Ba et al. 2016, arXiv 1607.06450)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """`weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last dimension; the bias may be None."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], in the type of `x`."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`x` [..., D] normed, in its type. On CPUs half precision is normed in fp32, since torch sums the gradients of
    weight and bias in the type of `x`: up to a third off for 4,096 tokens whose gradients lean one way."""
    exact = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu" or exact == x.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    bias = None if bias is None else bias.to(exact)
    return F.layer_norm(x.to(exact), weight.shape, weight.to(exact), bias, eps).to(x.dtype)
