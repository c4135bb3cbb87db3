"""Layers of a backbone: attention over documents, rotary positions, norms, MLPs, and residual blocks."""

from megahead.nn.attention import CausalSelfAttention
from megahead.nn.backends import BACKENDS, Attend, AttentionSpec, Backend, attend, choose_backend
from megahead.nn.block import Block
from megahead.nn.documents import Documents
from megahead.nn.embedding import Embedding, look_up
from megahead.nn.layer_norm import LayerNorm, layer_norm
from megahead.nn.mlp import MLP, GatedMLP
from megahead.nn.post_norm import PostNormBlock
from megahead.nn.rms_norm import RMSNorm
from megahead.nn.rotary import Rotation, Scaling, apply_rotary, rotary_at, scaled_as_llama3, scaled_linearly
from megahead.nn.self_attention import Heads, HeadsLinear, SelfAttention
from megahead.nn.shorter_rows import ShorterRows
from megahead.nn.target_positions import TargetPositions

__all__ = [
    "BACKENDS",
    "MLP",
    "Attend",
    "AttentionSpec",
    "Backend",
    "Block",
    "CausalSelfAttention",
    "Documents",
    "Embedding",
    "GatedMLP",
    "Heads",
    "HeadsLinear",
    "LayerNorm",
    "PostNormBlock",
    "RMSNorm",
    "Rotation",
    "Scaling",
    "SelfAttention",
    "ShorterRows",
    "TargetPositions",
    "apply_rotary",
    "attend",
    "choose_backend",
    "layer_norm",
    "look_up",
    "rotary_at",
    "scaled_as_llama3",
    "scaled_linearly",
]
