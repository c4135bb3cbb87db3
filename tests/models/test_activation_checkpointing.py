"""Recomputing blocks, or what is cheap in them, in the backward pass: the same gradients from less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megahead.config.model import ModelConfig
from megahead.models.blocks import Recompute, checkpoint_block
from megahead.models.families import build_backbone
from support.initialized import initialized_backbone

IDS = torch.arange(2 * 40).view(2, 40) % 50


class Held(TorchDispatchMode):
    """Knows which of the storages that were made inside are still held, by whoever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = storage._weak_ref(), storage.nbytes()
        return results

    def bytes(self, without: set[int]) -> int:
        return sum(
            size
            for place, (reference, size) in self.made.items()
            if place not in without and torch.UntypedStorage._new_with_weak_ptr(reference) is not None
        )


def trained(
    recompute: Recompute, dropout: float = 0.0, family: str = "gpt_neox"
) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Hidden states, gradients, bytes held for the backward pass, and its operations."""
    config = ModelConfig(
        family=family,
        num_layers=6,
        hidden_size=32,
        num_heads=4,
        vocab_size=50,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    backbone = initialized_backbone(config, 1)
    backbone.recompute_blocks = recompute
    torch.manual_seed(2)
    with Held() as held:
        hidden = backbone(IDS)
    size = held.bytes(without={parameter.untyped_storage()._cdata for parameter in backbone.parameters()})
    with FlopCounterMode(display=False) as operations:
        hidden.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in backbone.named_parameters() if parameter.grad is not None}
    return hidden.detach(), grads, size, operations.get_total_flops()


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2", "gemma3", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recompute", [True, "selective"])
def test_gradients_are_the_same_and_memory_is_less(recompute: Recompute, dropout: float, family: str) -> None:
    hidden, grads, held, _ = trained(False, dropout, family)
    hidden_again, grads_again, held_again, _ = trained(recompute, dropout, family)
    assert torch.equal(hidden, hidden_again)
    for name, grad in grads.items():
        torch.testing.assert_close(grads_again[name], grad)
    assert held_again < held / (5 if recompute is True else 1.4)


def test_selective_recomputation_multiplies_no_matrices() -> None:
    once, again, selective = (trained(recompute)[-1] for recompute in (False, True, "selective"))
    assert selective == once
    assert again > 1.3 * once


@pytest.mark.parametrize("name", ["flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward"])
def test_selective_recomputation_keeps_what_flash_attention_gave(name: str) -> None:
    """An operator of flash-attn's name in its place, whose calls are counted."""
    calls = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin()

    operator = torch.library.custom_op(name, forward, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    for selective, expected in ((True, 1), (False, 2)):
        calls = 0
        x = torch.ones(3, requires_grad=True)
        checkpoint_block(lambda x: operator(x * 2) * x, x, selective=selective).sum().backward()
        assert calls == expected


@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_evaluation_keeps_nothing(recompute: Recompute) -> None:
    config = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=50)
    backbone = build_backbone(config).eval()
    backbone.recompute_blocks = recompute
    with torch.no_grad():
        assert not backbone(IDS).requires_grad
