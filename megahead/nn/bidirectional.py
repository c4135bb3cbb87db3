"""Self-attention of an encoder: each token sees its whole document, both sides.

B rows, T tokens, H heads (of this rank), d dimensions of a head, D hidden size, N targets.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed import Group, per_rank_rng
from megahead.nn.backends import Attend, attend
from megahead.nn.documents import Documents
from megahead.nn.target_positions import TargetPositions


class BidirectionalSelfAttention(nn.Module):
    """Multi-head attention as in BERT: q, k and v have a projection each, positions are in the input already.

    The last block can thus compute queries for a few tokens only. The number of heads is read from the projections'
    width, so that a rank may hold a part of them.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.group = Group()  # of the ranks that hold the other heads: each drops weights of its own
        self.attend: Attend = attend
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor, documents: Documents, targets: TargetPositions | None = None) -> Tensor:
        """[B, T, D]: what each token reads from its document; with `targets` [N, D], for these alone."""
        queried = x_BTD if targets is None else targets.take(x_BTD)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size))
            for layer, x in ((self.query, queried), (self.key, x_BTD), (self.value, x_BTD))
        )
        dropout = self.dropout if self.training else 0.0
        with per_rank_rng(self.group, x_BTD.device) if dropout else nullcontext():
            heads = self._attend(q, k, v, documents, targets, dropout)
        mixed: Tensor = self.output(heads.flatten(-2))
        return mixed

    def _attend(
        self,
        q: Tensor,
        k_BTHd: Tensor,
        v_BTHd: Tensor,
        documents: Documents,
        targets: TargetPositions | None,
        dropout: float,
    ) -> Tensor:
        """[B, T, H, d], or [N, H, d] for queries of targets."""
        if targets is None:
            return self.attend(q, k_BTHd, v_BTHd, documents, dropout, causal=False)
        return targets.gather(attend_at(targets.spread(q), k_BTHd, v_BTHd, documents, targets, dropout))


def attend_at(
    q_BMHd: Tensor,
    k_BTHd: Tensor,
    v_BTHd: Tensor,
    documents: Documents,
    targets: TargetPositions,
    dropout: float,
) -> Tensor:
    """[B, M, H, d]: softmax(q k / sqrt(d)) v of M queries a row over the whole document of each."""
    q, k, v = (x.transpose(1, 2) for x in (q_BMHd, k_BTHd, v_BTHd))
    mask_B1MT = None if documents.one_per_row else targets.mask(documents.same_document_BTT)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1MT, dropout_p=dropout).transpose(1, 2)
