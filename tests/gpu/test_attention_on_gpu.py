"""Every attention kernel that is there, in half precision, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.models.attention_backends import BACKENDS, AttentionSpec, attend
from megahead.models.documents import Documents
from support.exact_attention import POSITIONS, random_qkv, relative_errors

LONG = torch.cat([torch.arange(200), torch.arange(1), torch.arange(129), torch.arange(182)]).repeat(2, 1)
LONG[1] = torch.arange(512)
"""Documents of more and less than a kernel's block, and a row that is one."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_kernel_is_within_rounding(
    name: str, window: int | None, head_size: int, packed: bool, causal: bool, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(torch.device("cuda"), dtype, head_size, local=window is not None)
    if reason := BACKENDS[name].unsupported_reason(spec):
        pytest.skip(reason)
    qkv = random_qkv("cuda", dtype, (2, 512, 3, head_size))
    errors = relative_errors(BACKENDS[name].attend, qkv, LONG if packed else None, causal, window)
    assert max(errors) < torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_documents_do_not_feel_each_other(name: str) -> None:
    reason = BACKENDS[name].unsupported_reason(AttentionSpec(torch.device("cuda"), torch.bfloat16, 64))
    if reason:
        pytest.skip(reason)
    qkv = random_qkv("cuda", torch.bfloat16, (2, 512, 3, 64))
    output = BACKENDS[name].attend(*qkv, Documents(LONG.cuda()), causal=False)
    (gradient,) = torch.autograd.grad(output[0, 201:330].sum(), qkv)
    assert gradient[:, 0, 201:330].any()
    assert not gradient[:, 0, :201].any()
    assert not gradient[:, 0, 330:].any()
    assert not gradient[:, 1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_keeps_the_mean_and_the_gradient_of_what_was_kept(name: str) -> None:
    reason = BACKENDS[name].unsupported_reason(AttentionSpec(torch.device("cuda"), torch.bfloat16, 64, 0.2))
    if reason:
        pytest.skip(reason)
    q, k, _ = random_qkv("cuda", torch.bfloat16, (2, 512, 3, 64))
    v = torch.ones_like(k, requires_grad=True)
    output = BACKENDS[name].attend(q, k, v, Documents(LONG.cuda()), 0.2, causal=False)
    assert 0.98 < output.mean() < 1.02
    assert output.std() > 0.01
    (gradient,) = torch.autograd.grad(output.sum(), v)  # the function is linear in v: its gradient gives it again
    torch.testing.assert_close((gradient * v).double().sum(), output.double().sum(), rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [None, POSITIONS])
def test_float32_equals_the_cpu(positions: Tensor | None) -> None:
    assert max(relative_errors(attend, random_qkv("cuda", torch.float32), positions, True)) < 1e-4
