"""Backbones: tokens to hidden states, without a head; how to build, initialise and shard them."""

from megahead.models.backbone import Backbone
from megahead.models.bert import Bert
from megahead.models.compilation import CompiledBlocks
from megahead.models.gpt_neox import GPTNeoX
from megahead.models.initialize import initial_value, initialize_
from megahead.models.registry import SHARDING, build_backbone

__all__ = [
    "SHARDING",
    "Backbone",
    "Bert",
    "CompiledBlocks",
    "GPTNeoX",
    "build_backbone",
    "initial_value",
    "initialize_",
]
