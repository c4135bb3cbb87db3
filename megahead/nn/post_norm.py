"""The block of the original transformer and of BERT: each sublayer's sum with its input is normed."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megahead.nn.documents import Documents
from megahead.nn.layer_norm import LayerNorm
from megahead.nn.mlp import MLP
from megahead.nn.self_attention import SelfAttention
from megahead.nn.target_positions import TargetPositions


class PostNormBlock(nn.Module):
    """`y = norm(x + attention(x))`, then `norm(y + mlp(y))`."""

    def __init__(
        self,
        hidden_size: int,
        attention: SelfAttention,
        mlp: MLP,
        *,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = attention
        self.attention_norm = LayerNorm(hidden_size, eps=norm_eps)
        self.mlp = mlp
        self.mlp_norm = LayerNorm(hidden_size, eps=norm_eps)

    def forward(self, x_BTD: Tensor, documents: Documents, targets: TargetPositions | None = None) -> Tensor:
        """[B, T, D]; [N, D] with `targets`, the positions whose outputs are wanted (masked tokens): keys and values are
        computed for all tokens, everything else only for the targets."""
        x = x_BTD if targets is None else targets.take(x_BTD)
        rotation = None  # positions were added to the embeddings
        x = self.attention_norm(x + self._drop(self.attention(x_BTD, rotation, documents, targets)))
        output: Tensor = self.mlp_norm(x + self._drop(self.mlp(x)))
        return output

    def _drop(self, added: Tensor) -> Tensor:
        return F.dropout(added, self.dropout, self.training)
