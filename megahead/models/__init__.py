"""Backbones: tokens to hidden states, without a head; their initial weights and how they are sharded."""

from megahead.models.backbone import Backbone
from megahead.models.bert import Bert
from megahead.models.compilation import CompiledBlocks
from megahead.models.gpt_neox import GPTNeoX
from megahead.models.initialize import initial_blocks, initial_value
from megahead.models.llama import Llama
from megahead.models.modernbert import ModernBert
from megahead.models.registry import SHARDING, build_backbone

__all__ = [
    "SHARDING",
    "Backbone",
    "Bert",
    "CompiledBlocks",
    "GPTNeoX",
    "Llama",
    "ModernBert",
    "build_backbone",
    "initial_blocks",
    "initial_value",
]
