"""Bricks of a backbone: attention over documents, rotary positions, the MLP, and residual blocks."""

from megahead.nn.attention import CausalSelfAttention
from megahead.nn.backends import BACKENDS, Attend, Backend, Use, attend, choose_backend
from megahead.nn.bidirectional import BidirectionalSelfAttention
from megahead.nn.block import Block
from megahead.nn.documents import Documents
from megahead.nn.mlp import MLP
from megahead.nn.post_norm import PostNormBlock
from megahead.nn.rotary import Rotation, rotate, rotation_at
from megahead.nn.targets import Targets

__all__ = [
    "BACKENDS",
    "MLP",
    "Attend",
    "Backend",
    "BidirectionalSelfAttention",
    "Block",
    "CausalSelfAttention",
    "Documents",
    "PostNormBlock",
    "Rotation",
    "Targets",
    "Use",
    "attend",
    "choose_backend",
    "rotate",
    "rotation_at",
]
