"""Layers of a backbone: attention over documents, rotary positions, the MLP, and residual blocks."""

from megahead.nn.attention import CausalSelfAttention
from megahead.nn.backends import BACKENDS, Attend, AttentionSpec, Backend, attend, choose_backend
from megahead.nn.bidirectional import BidirectionalSelfAttention
from megahead.nn.block import Block
from megahead.nn.documents import Documents
from megahead.nn.mlp import MLP
from megahead.nn.post_norm import PostNormBlock
from megahead.nn.rotary import Rotation, apply_rotary, rotary_at
from megahead.nn.target_positions import TargetPositions

__all__ = [
    "BACKENDS",
    "MLP",
    "Attend",
    "AttentionSpec",
    "Backend",
    "BidirectionalSelfAttention",
    "Block",
    "CausalSelfAttention",
    "Documents",
    "PostNormBlock",
    "Rotation",
    "TargetPositions",
    "apply_rotary",
    "attend",
    "choose_backend",
    "rotary_at",
]
