"""Looking up rows of a table by id."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Embedding):
    """A table of rows, as torch has it but for half precision on CPUs, see `look_up`."""

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D]: the rows of `ids`, of any shape."""
        return look_up(ids, self.weight)


def look_up(ids: Tensor, weight_VD: Tensor) -> Tensor:
    """[..., D]: rows of `weight_VD`, whose gradient is dense. In half precision on CPUs rows are selected by index,
    which sums the gradients of an id in fp32; torch's look-up sums them in half precision, where a sum stops growing
    after some hundred occurrences."""
    if weight_VD.device.type != "cpu" or weight_VD.dtype not in (torch.bfloat16, torch.float16):
        return F.embedding(ids, weight_VD)
    return weight_VD.index_select(0, ids.flatten()).view(*ids.shape, -1)
