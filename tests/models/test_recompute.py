"""Recomputing blocks in the backward pass: the same gradients, dropout included, from less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.config import ModelConfig
from megahead.models import build_backbone, initialize_

CONFIG = ModelConfig(
    num_layers=6, hidden_size=32, num_heads=4, vocab_size=50, hidden_dropout=0.2, attention_dropout=0.2
)
IDS = torch.arange(2 * 40).view(2, 40) % 50


def trained(recompute: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """Hidden states, gradients, and bytes kept for the backward pass."""
    backbone = build_backbone(CONFIG)
    initialize_(backbone, 1, CONFIG)
    backbone.recompute_blocks = recompute
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backbone(IDS)
    hidden.square().sum().backward()
    weights = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    grads = {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    return hidden.detach(), grads, sum(size for place, size in kept.items() if place not in weights)


def test_gradients_are_the_same_and_memory_is_less() -> None:
    hidden, grads, kept = trained(recompute=False)
    hidden_again, grads_again, kept_again = trained(recompute=True)
    assert torch.equal(hidden, hidden_again)
    for name, grad in grads.items():
        torch.testing.assert_close(grads_again[name], grad)
    assert kept_again < kept / 5


@pytest.mark.parametrize("recompute", [False, True])
def test_evaluation_keeps_nothing(recompute: bool) -> None:
    backbone = build_backbone(CONFIG).eval()
    backbone.recompute_blocks = recompute
    with torch.no_grad():
        assert not backbone(IDS).requires_grad
