"""One pre-norm transformer block, its two sublayers side by side (GPT-NeoX, GPT-J) or in sequence (Llama)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed import Group, per_rank_rng
from megahead.nn.attention import CausalSelfAttention
from megahead.nn.documents import Documents
from megahead.nn.mlp import MLP, GatedMLP
from megahead.nn.rotary import Rotation
from megahead.nn.self_attention import SelfAttention
from megahead.nn.target_positions import TargetPositions


class Block(nn.Module):
    """Parallel: `x + attention(norm x) + mlp(norm' x)`; sequential: the MLP reads the sum with attention."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: CausalSelfAttention | SelfAttention,
        mlp_norm: nn.Module,
        mlp: MLP | GatedMLP,
        *,
        parallel: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.sequence_group = Group()  # ranks that hold the rows' other tokens: each draws its own dropout
        self.dropout = dropout
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, x_BTD: Tensor, rotation: Rotation, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: the residual stream after this block.

        [N, D] with `targets`: keys and values of all tokens, everything else of the targets alone.
        """
        normed_BTD = self.attention_norm(x_BTD)
        if targets is None:
            x, attended = x_BTD, self.attention(normed_BTD, rotation, documents)
        else:
            x, attended = targets.take(x_BTD), self.attention(normed_BTD, rotation, documents, targets)
        if self.parallel:
            return x + self._drop(attended) + self._drop(self.mlp(self.mlp_norm(x)))
        x = x + self._drop(attended)
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, added: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return added
        with per_rank_rng(self.sequence_group, added.device):
            return F.dropout(added, self.dropout)
