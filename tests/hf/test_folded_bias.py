"""A bias over the vocabulary, folded into matrix and norm: exactly `E h / T + log q`, and well-conditioned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.errors import CheckpointError
from megahead.hf.heads import Head, fold_bias
from megahead.losses.candidates import log_unigram

WIDTH, VOCABULARY = 512, 700


def largest_error(weight: Tensor, bias: Tensor, temperature: float, dtype: torch.dtype) -> float:
    """Of the folded head in `dtype` against the definition in float64."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.1
    log_q = log_unigram(torch.randint(10**6, (VOCABULARY,), generator=generator) ** 2, VOCABULARY)
    x = F.layer_norm(torch.randn(200, WIDTH, generator=generator), [WIDTH])
    hidden = x.double() * weight.double() + bias.double()
    expected = hidden @ matrix.double().T / temperature + log_q.double()

    folded = fold_bias(weight, bias, log_q)
    head = Head("pmi", "backbone.embedding.weight", temperature, folded)
    outputs = F.layer_norm(x, [WIDTH], weight, head.exported_norm_bias(bias).float()).to(dtype)
    pieces = [head.exported_rows(matrix[first : first + 300], first) for first in range(0, VOCABULARY, 300)]
    return float((outputs @ torch.cat(pieces).to(dtype).T - expected).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("seed", range(5))
def test_random_norms(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
    bias = 0.2 * torch.randn(WIDTH, generator=generator)
    assert largest_error(weight, bias, temperature, torch.float32) < 1e-4


@pytest.mark.parametrize("bias", [0.0, 1e-3, 3.0, -3.0])
def test_biases_from_none_to_large(bias: float) -> None:
    assert largest_error(torch.ones(WIDTH), torch.full((WIDTH,), bias), 1.0, torch.float32) < 1e-4


def test_a_bias_that_would_make_the_unshifted_constant_vanish() -> None:
    bias = torch.cat([torch.ones(WIDTH // 2), -torch.ones(WIDTH // 2)])
    assert largest_error(torch.ones(WIDTH), bias, 1.0, torch.float32) < 1e-4


def test_small_and_negative_norm_weights() -> None:
    weight = torch.linspace(-1, 1, WIDTH)  # the smallest is 1/511
    assert largest_error(weight, torch.zeros(WIDTH), 1.0, torch.float32) < 1e-4


def test_bf16_errs_by_its_own_rounding_and_not_much_more() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
    assert largest_error(weight, torch.zeros(WIDTH), 1.0, torch.bfloat16) < 0.3


def test_a_zero_norm_weight_is_reported() -> None:
    weight = torch.ones(WIDTH)
    weight[7] = 0
    with pytest.raises(CheckpointError, match="1 of the final norm's 512 weights are exactly 0"):
        fold_bias(weight, torch.zeros(WIDTH), torch.zeros(3))
