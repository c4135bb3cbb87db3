"""One pre-norm transformer block, its two sublayers side by side (GPT-NeoX, GPT-J) or in sequence (Llama)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed import Group, per_rank_rng
from megahead.nn.attention import CausalSelfAttention
from megahead.nn.documents import Documents
from megahead.nn.mlp import MLP, GatedMLP
from megahead.nn.rotary import Rotation
from megahead.nn.self_attention import SelfAttention


class Block(nn.Module):
    """Parallel: `x + attention(norm x) + mlp(norm' x)`; sequential: the MLP reads the sum with attention."""

    def __init__(
        self,
        attention: CausalSelfAttention | SelfAttention,
        mlp: MLP | GatedMLP,
        norm: Callable[[], nn.Module],
        *,
        parallel: bool,
        dropout: float,
    ) -> None:
        """`norm` makes each of the two."""
        super().__init__()
        self.parallel = parallel
        self.sequence_group = Group()  # ranks that hold the rows' other tokens: each draws its own dropout
        self.dropout = dropout
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        """[B, T, D]: the residual stream after this block."""
        attended_BTD = self._drop(self.attention(self.attention_norm(x_BTD), rotation, documents))
        if self.parallel:
            return x_BTD + attended_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)))
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)))

    def _drop(self, added_BTD: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return added_BTD
        with per_rank_rng(self.sequence_group, added_BTD.device):
            return F.dropout(added_BTD, self.dropout)
