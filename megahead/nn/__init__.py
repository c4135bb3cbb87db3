"""Bricks of a backbone: attention over documents, rotary positions, the MLP, and the residual block."""

from megahead.nn.attention import CausalSelfAttention, attend
from megahead.nn.block import Block
from megahead.nn.documents import Documents
from megahead.nn.mlp import MLP
from megahead.nn.rotary import Rotation, rotate, rotation_at

__all__ = ["MLP", "Block", "CausalSelfAttention", "Documents", "Rotation", "attend", "rotate", "rotation_at"]
