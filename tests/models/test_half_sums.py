"""Layer norm and look-up in bf16 on a CPU: gradients are sums over tokens, and as close to fp32's as bf16 can be."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from megahead.models.layers import Embedding, LayerNorm

TOKENS, WIDTH, IDS = 4_096, 32, 3
ACTIVATIONS = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
LAYERS = {
    "norm": (LayerNorm(WIDTH), ACTIVATIONS),
    "norm without a bias": (LayerNorm(WIDTH, bias=False), ACTIVATIONS),
    "embedding": (Embedding(IDS, WIDTH), torch.arange(TOKENS).view(4, -1) % IDS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_bf16_are_those_in_fp32(name: str) -> None:
    layer, inputs = LAYERS[name]
    half = deepcopy(layer).bfloat16()
    single = deepcopy(half).float()
    lean = (torch.randn(*half(inputs).shape, generator=torch.Generator().manual_seed(1)) + 0.3).bfloat16()
    gradients = _gradients(half, inputs, lean)
    expected = _gradients(single, inputs.float() if inputs.is_floating_point() else inputs, lean.float())
    for found, wanted in zip(gradients, expected, strict=True):
        assert (found.float() - wanted).norm() < 3e-3 * wanted.norm()  # torch's own: 0.04 to 0.10


def _gradients(layer: nn.Module, inputs: Tensor, of_output: Tensor) -> list[Tensor]:
    output: Tensor = layer(inputs)
    assert output.dtype == of_output.dtype
    return list(torch.autograd.grad(output, list(layer.parameters()), of_output))
