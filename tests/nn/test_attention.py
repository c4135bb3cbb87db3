"""Every way to compute attention gives what the formula gives, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megahead.nn import CausalSelfAttention, Documents, attend, rotation_at
from megahead.nn.attention import attend_each, attend_masked, attend_varlen, flash_attn_varlen_func

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 1, 2, 3, 4]])


def formula(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, mask_BTT: Tensor) -> Tensor:
    scores_BHTT = torch.einsum("bqhd,bkhd->bhqk", q_BTHd, k_BTHd) / math.sqrt(q_BTHd.shape[-1])
    weights_BHTT = scores_BHTT.masked_fill(~mask_BTT[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights_BHTT, v_BTHd)


def random_qkv(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, 7, 3, 8, generator=generator, dtype=torch.float64)
    return qkv.to(device, dtype).requires_grad_()


def value_and_gradient(output: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    (gradient,) = torch.autograd.grad((output * weights).sum(), qkv)
    return output.detach(), gradient


@pytest.mark.parametrize("way", [attend, attend_each, attend_masked])
def test_documents_equal_the_formula(way):
    qkv = random_qkv()
    documents = Documents(POSITIONS)
    expected = value_and_gradient(formula(*qkv, documents.mask_BTT), qkv)
    torch.testing.assert_close(value_and_gradient(way(*qkv, documents), qkv), expected)


def test_without_documents_a_row_is_one():
    qkv = random_qkv()
    expected = value_and_gradient(formula(*qkv, torch.ones(2, 7, 7, dtype=torch.bool).tril()), qkv)
    torch.testing.assert_close(value_and_gradient(attend(*qkv, None), qkv), expected)


@pytest.mark.gpu
@pytest.mark.skipif(flash_attn_varlen_func is None, reason="needs flash-attn")
def test_flash_varlen_errs_no_more_than_the_masked_way():
    exact = random_qkv("cuda")
    documents = Documents(POSITIONS.cuda())
    truth = value_and_gradient(formula(*exact, documents.mask_BTT), exact)

    def errors(way) -> list[float]:
        half = random_qkv("cuda", torch.bfloat16)
        found = value_and_gradient(way(*half, documents), half)
        return [float((f.double() - t).abs().max()) for f, t in zip(found, truth, strict=True)]

    for flash, masked in zip(errors(attend_varlen), errors(attend_masked), strict=True):
        assert flash <= 1.5 * masked


@pytest.mark.gpu
def test_cuda_without_flash_equals_the_cpu():
    on_cpu, on_gpu = random_qkv(dtype=torch.float32), random_qkv("cuda", torch.float32)
    expected = value_and_gradient(attend(*on_cpu, Documents(POSITIONS)), on_cpu)
    found = value_and_gradient(attend(*on_gpu, Documents(POSITIONS.cuda())), on_gpu)
    torch.testing.assert_close([x.cpu() for x in found], list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("documents", [None, Documents(POSITIONS)])
def test_dropout_acts_in_training_only(documents):
    layer = CausalSelfAttention(24, 3, dropout=0.5)
    x_BTD, rotation = torch.randn(2, 7, 24), rotation_at(POSITIONS, 4, 10000.0)
    assert not torch.equal(layer(x_BTD, rotation, documents), layer(x_BTD, rotation, documents))
    layer.eval()
    assert torch.equal(layer(x_BTD, rotation, documents), layer(x_BTD, rotation, documents))


def test_a_run_of_heads_alone_computes_its_part():
    """What sharding relies on: rows of qkv head by head, columns of output likewise."""
    torch.manual_seed(0)
    whole = CausalSelfAttention(24, 3)
    part = CausalSelfAttention(24, 3)
    part.qkv.weight = torch.nn.Parameter(whole.qkv.weight[24:72])
    part.qkv.bias = torch.nn.Parameter(whole.qkv.bias[24:72])
    part.output.weight = torch.nn.Parameter(whole.output.weight[:, 8:24])
    silenced = CausalSelfAttention(24, 3)
    silenced.load_state_dict(whole.state_dict())
    with torch.no_grad():
        silenced.output.weight[:, :8] = 0
        part.output.bias.copy_(whole.output.bias)
    x_BTD, rotation = torch.randn(2, 7, 24), rotation_at(torch.arange(7), 4, 10000.0)
    torch.testing.assert_close(part(x_BTD, rotation, None), silenced(x_BTD, rotation, None))
