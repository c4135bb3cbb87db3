"""Counts from the config equal those of the built model."""

from __future__ import annotations

import pytest
import torch

from megahead.config import NAMED_SIZES, ModelConfig
from megahead.estimate import count_parameters
from megahead.models import build_backbone

ODD = ModelConfig(num_layers=3, hidden_size=48, num_heads=3, intermediate_size=100, vocab_size=61, vocab_multiple=16)


@pytest.mark.parametrize("config", [ODD, *(ModelConfig(size=size, vocab_size=50277) for size in NAMED_SIZES)])
def test_counts_equal_the_model(config):
    with torch.device("meta"):
        backbone = build_backbone(config)
    counts = count_parameters(config)
    assert counts.embedding == backbone.embedding.weight.numel()
    assert counts.total == sum(parameter.numel() for parameter in backbone.parameters())


def test_an_untied_head_is_one_more_table():
    without, with_head = count_parameters(ODD), count_parameters(ODD, untied_head=True)
    assert with_head.head == with_head.embedding == 64 * 48
    assert with_head.total == without.total + 64 * 48
