"""bf16 attention on a CPU: as exact as torch's own, and chosen where its backward pass is the faster."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megahead.models import attention_backends as cpu_attention
from megahead.models.attention_backends import (
    BACKENDS,
    attend_per_document,
    attend_with_document_mask,
    attend_without_mask,
)
from megahead.models.documents import mask_to_bias
from support.exact_attention import POSITIONS, random_qkv, relative_errors


def _as_torch(q, k, v, documents, dropout=0.0, *, causal=True):
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*rows, is_causal=causal).transpose(1, 2)


def _ours(q, k, v, documents, dropout=0.0, *, causal=True):
    return attend_without_mask(q, k, v, dropout, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "length"), [(1, 512), (3, 200), (4, 171), (8, 128), (40, 48)])
def test_by_products_it_is_as_exact_as_scores_in_bf16_are(rows: int, length: int, causal: bool) -> None:
    """In blocks of heads of which the last may be smaller; torch's kernel keeps scores in fp32."""
    shape = (rows, length, 3, 32)
    assert cpu_attention._is_matmul_faster(*[torch.empty(rows, 3, length, 32)] * 2)
    ours, theirs = (
        relative_errors(way, random_qkv(dtype=torch.bfloat16, shape=shape), None, causal) for way in (_ours, _as_torch)
    )
    assert ours[0] == theirs[0]  # the same forward pass
    assert ours[1] <= 2 * theirs[1]


def _bf16_attention(q, k, v):
    return cpu_attention.bf16_attention(q, k, v, causal=False)


@pytest.mark.parametrize("targets", [5, 40])
def test_queries_of_an_encoders_targets_alone(targets: int) -> None:
    """By both ways: a gradient is that of fp32, but for rounding to bf16."""
    q, gradient = (torch.randn(8, 4, targets, 32) for _ in range(2))
    k, v = (torch.randn(8, 4, 128, 32) for _ in range(2))
    found = []
    for attend, dtype in ((F.scaled_dot_product_attention, torch.float32), (_bf16_attention, torch.bfloat16)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        attend(*inputs).backward(gradient.to(dtype))
        found.append([x.grad.float() for x in inputs])
    assert cpu_attention._is_matmul_faster(q, k) == (targets == 40)
    for exact, ours in zip(*found, strict=True):
        assert (exact - ours).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("at_once", [1, 2 * 3 * 7 * 7, 2**20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_documents_under_a_mask(monkeypatch, at_once: int, causal: bool, window: int | None) -> None:
    """Row by row, in blocks of two of which the last is smaller, and all at once."""
    monkeypatch.setattr(cpu_attention, "_SCORES_PER_CHUNK", at_once)
    qkv, positions = random_qkv(dtype=torch.bfloat16, shape=(5, 7, 3, 8)), POSITIONS[[0, 1, 0, 1, 1]]
    value, gradient = relative_errors(BACKENDS["sdpa"].attend, qkv, positions, causal, window)
    assert value < 0.004
    assert gradient < 0.006


def test_a_gradient_that_is_laid_out_in_another_order() -> None:
    q, k, v = (torch.randn(2, 3, 20, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = mask_to_bias(torch.ones(1, 20, 20, dtype=torch.bool).tril(), torch.bfloat16)
    output, gradient = cpu_attention.bf16_attention(q, k, v, True, bias), torch.randn(2, 20, 3, 8).bfloat16()
    found = torch.autograd.grad(output, (q, k, v), gradient.transpose(1, 2), retain_graph=True)
    expected = torch.autograd.grad(output, (q, k, v), gradient.transpose(1, 2).contiguous())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_says_of_itself_what_a_compiler_must_know(bias: bool, causal: bool) -> None:
    heads = [torch.randn(3, 4, 2, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    added = torch.zeros(3, 4, 4, dtype=torch.bfloat16) if bias else None
    torch.library.opcheck(cpu_attention._matmul_backward, (*heads, added, causal))


def test_gradients_by_products_do_not_depend_on_the_rows_beside() -> None:
    q, k, v, gradient = (torch.randn(8, 2, 256, 16, dtype=torch.bfloat16) for _ in range(4))
    rows, halves = [], []
    for found, parts in ((rows, [slice(0, 8)]), (halves, [slice(0, 3), slice(3, 8)])):
        for part in parts:
            inputs = [x[part].clone().requires_grad_() for x in (q, k, v)]
            cpu_attention.bf16_attention(*inputs, True).backward(gradient[part])
            found.append(torch.cat([x.grad for x in inputs], -1))
    torch.testing.assert_close(torch.cat(rows), torch.cat(halves))  # blocks of other sizes may round otherwise


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_it_is_no_less_exact_than_torch_in_bf16(length: int, causal: bool) -> None:
    shape = (2, length, 3, 16)
    ours, theirs = (
        relative_errors(way, random_qkv(dtype=torch.bfloat16, shape=shape), None, causal) for way in (_ours, _as_torch)
    )
    assert ours[0] == theirs[0]  # the same forward pass
    assert ours[1] <= 1.05 * theirs[1] + 1e-6


def test_it_serves_packed_documents_and_gradients_keep_their_format() -> None:
    qkv = random_qkv(dtype=torch.bfloat16)
    ours = relative_errors(
        lambda q, k, v, d, causal: attend_per_document(q, k, v, d, 0.0, causal), qkv, POSITIONS, True
    )
    mask = relative_errors(
        lambda q, k, v, d, causal: attend_with_document_mask(q, k, v, d, 0.0, causal), qkv, POSITIONS, True
    )
    assert ours[1] < 1.5 * mask[1]
    q = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    attend_without_mask(q, q, q, 0.0, True).sum().backward()
    assert q.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "dropout", "serves"),
    [
        ((1, 2, 256, 64), torch.bfloat16, 0.0, True),
        ((1, 1, 257, 64), torch.bfloat16, 0.0, False),  # torch's bf16 backward is the faster from here,
        ((1, 2, 257, 64), torch.bfloat16, 0.0, True),  # but for products where there are more scores
        ((8, 8, 512, 128), torch.bfloat16, 0.0, True),
        ((8, 8, 513, 128), torch.bfloat16, 0.0, False),
        ((1, 2, 256, 64), torch.float32, 0.0, False),
        ((1, 2, 256, 64), torch.bfloat16, 0.1, False),
        ((1, 2, 0, 64), torch.bfloat16, 0.0, False),
    ],
)
def test_where_it_serves(shape, dtype, dropout: float, serves: bool) -> None:
    assert cpu_attention.should_use_bf16_attention(*[torch.empty(shape, dtype=dtype)] * 2, dropout) is serves


@pytest.mark.parametrize(
    ("shape", "dtype", "dropout", "serves"),
    [
        ((1, 1, 512, 8), torch.bfloat16, 0.0, True),
        ((1, 1, 513, 8), torch.bfloat16, 0.0, False),
        ((1, 1, 512, 8), torch.float32, 0.0, False),
        ((1, 1, 512, 8), torch.bfloat16, 0.1, False),
        ((0, 1, 512, 8), torch.bfloat16, 0.0, False),
    ],
)
def test_where_it_serves_documents_under_a_mask(shape, dtype, dropout: float, serves: bool) -> None:
    assert cpu_attention.should_use_masked_bf16_attention(torch.empty(shape, dtype=dtype), shape[2], dropout) is serves


@pytest.mark.parametrize("length", [5, 300])
def test_it_can_be_compiled(length: int) -> None:
    q = torch.randn(1, length, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: attend_without_mask(x, x, x, 0.0, True), backend="aot_eager", fullgraph=True)
    found, plain = compiled(q), attend_without_mask(q, q, q, 0.0, True)
    assert torch.equal(found, plain)
    gradients = [torch.autograd.grad(output.sum(), q)[0] for output in (found, plain)]
    assert torch.equal(*gradients)
