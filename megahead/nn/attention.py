"""Causal self-attention of a decoder.

B rows, T tokens, H heads (of this rank), d dimensions of a head, D hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megahead.distributed import Group, per_rank_rng
from megahead.nn.backends import Attend, attend
from megahead.nn.documents import Documents
from megahead.nn.rotary import Rotation, apply_rotary


class CausalSelfAttention(nn.Module):
    """Multi-head attention with rotary positions; one projection makes q, k and v.

    Rows of `qkv.weight` are ordered head by head, within a head q, k, v: any contiguous run of heads is a
    contiguous run of rows. The number of heads is read from the projection's width, so that a rank may hold a part of
    them.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.group = Group()  # ranks that hold the other heads: each draws its own dropout
        self.attend: Attend = attend
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        """[B, T, D]: what each token reads from its document's past."""
        q, k, v = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        heads_BTHd = self._attend(q, k, v, documents)
        mixed_BTD: Tensor = self.output(heads_BTHd.flatten(2))
        return mixed_BTD

    def _attend(self, q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return self.attend(q_BTHd, k_BTHd, v_BTHd, documents)
        with per_rank_rng(self.group, q_BTHd.device):
            return self.attend(q_BTHd, k_BTHd, v_BTHd, documents, self.dropout)
