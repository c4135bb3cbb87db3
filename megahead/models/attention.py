"""Self-attention: with one joint projection (GPT-NeoX), or one each for queries, keys and values (BERT, Llama).

B rows, T tokens, H heads and K key heads (of this rank), d dimensions of a head, D hidden size, N targets.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed.group import Group, per_rank_rng
from megahead.models.attention_backends import (
    Attend,
    attend,
    attend_rows,
    bf16_attention,
    is_supported_masked,
    repeated,
)
from megahead.models.documents import Documents, TargetPositions, bias_of
from megahead.models.layers import RMSNorm, Rotation, apply_rotary


class Heads(NamedTuple):
    """How many heads there are, and what their projections are like."""

    queries: int
    keys: int
    """Heads of keys and values; each serves queries / keys heads (Ainslie et al. 2023, arXiv 2305.13245)."""

    size: int
    """Dimensions of each."""

    bias: bool = True
    """Of the projections that make queries, keys and values."""

    output_bias: bool = True
    """Of the one that joins the heads."""

    norm_eps: float | None = None
    """Queries and keys are normed head by head before they are compared; None: they are not."""

    joint: bool = False
    """Whether one projection makes queries, keys and values. Its rows are ordered head by head, within a head q, k, v:
    any contiguous run of heads is a contiguous run of rows."""


class HeadsLinear(nn.Linear):
    """A linear layer whose output features are `heads` of equal size."""

    def __init__(self, hidden_size: int, heads: int, head_size: int, bias: bool) -> None:
        super().__init__(hidden_size, heads * head_size, bias)
        self.heads = heads


class SelfAttention(nn.Module):
    """Multi-head attention over documents, causal or over both sides.

    The last block of an encoder can compute queries for a few tokens only. The number of heads is read from the
    projections' width, so that a rank may hold a part of them.
    """

    def __init__(self, hidden_size: int, heads: Heads, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size, self.joint, self.causal, self.dropout = heads.size, heads.joint, causal, dropout
        self.group = Group()  # ranks that hold the other heads: each draws its own dropout
        self.attend: Attend = attend
        width = heads.queries * heads.size
        if heads.joint:
            self.qkv = nn.Linear(hidden_size, 3 * width, heads.bias)
        else:
            self.query = nn.Linear(hidden_size, width, heads.bias)
            self.key = HeadsLinear(hidden_size, heads.keys, heads.size, heads.bias)
            self.value = HeadsLinear(hidden_size, heads.keys, heads.size, heads.bias)
            self.query_norm = _norm(heads)
            self.key_norm = _norm(heads)
        self.output = nn.Linear(width, hidden_size, heads.output_bias)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: what each token reads from its document; with `targets` [N, D], for these alone.

        Without `rotation` positions must be in the input already.
        """
        q, k, v = self._projected(x_BTD, targets)
        if rotation is not None:
            q, k = apply_rotary(q, rotation if targets is None else rotation.at(targets)), apply_rotary(k, rotation)
        dropout = self.dropout if self.training else 0.0
        with per_rank_rng(self.group, x_BTD.device) if dropout else nullcontext():
            if targets is None:
                heads = self.attend(q, k, v, documents, dropout, self.causal)
            else:
                heads_BMHd = attend_at(targets.spread(q), k, v, documents, targets, dropout, self.causal)
                heads = targets.gather(heads_BMHd)
        mixed: Tensor = self.output(heads.flatten(-2))
        return mixed

    def _projected(self, x_BTD: Tensor, targets: TargetPositions | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, d], or [N, H, d] of the targets; k and v [B, T, K, d]."""
        if self.joint:
            q, k, v = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q if targets is None else targets.take(q), k, v
        queried = x_BTD if targets is None else targets.take(x_BTD)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size))
            for layer, x in ((self.query, queried), (self.key, x_BTD), (self.value, x_BTD))
        )
        return self.query_norm(q), self.key_norm(k), v


def _norm(heads: Heads) -> nn.Module:
    return nn.Identity() if heads.norm_eps is None else RMSNorm(heads.size, eps=heads.norm_eps)


def attend_at(
    q_BMHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    documents: Documents,
    targets: TargetPositions,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """[B, M, H, d]: softmax(q k / sqrt(d)) v of M queries a row over the document of each, within its window; `causal`:
    over what precedes them there."""
    if documents.need_no_mask and not causal:
        return attend_rows(q_BMHd, k_BTKd, v_BTKd, dropout, causal)
    q, k, v = (x.transpose(1, 2) for x in (q_BMHd, k_BTKd, v_BTKd))
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    mask_BMT = targets.mask(documents.causal_mask_BTT if causal else documents.mask_BTT)
    if is_supported_masked(q, k.shape[2], dropout):
        return bf16_attention(q, k, v, causal, bias_of(mask_BMT, q.dtype)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BMT[:, None], dropout_p=dropout).transpose(1, 2)
