"""What all backbones promise."""

from __future__ import annotations

import pytest
import torch

from megahead.config.model import ModelConfig
from megahead.models.documents import Documents, TargetPositions
from support.initialized import initialized_backbone


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2", "gemma3", "bert"])
@pytest.mark.parametrize("max_per_row", [None, 2])
def test_whole_rows_need_no_mask_and_no_lengths(family: str, max_per_row: int | None) -> None:
    """Lengths would make a GPU wait, and a mask is T x T."""
    config = ModelConfig(family=family, num_layers=2, hidden_size=32, num_heads=2, vocab_size=50)
    backbone, documents = initialized_backbone(config, 0), Documents.whole_rows(2, 8)
    targets = TargetPositions(torch.tensor([1, 5, 9]), 2, 8, max_per_row)
    made = set(vars(documents))
    backbone.encode_at(backbone.embed(torch.arange(16).view(2, 8)), documents, targets).sum().backward()
    assert set(vars(documents)) == made
