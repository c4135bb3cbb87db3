"""Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension; no mean is taken off, and there is no bias."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], in the type of `x`, where autocast leaves the weight in fp32."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
