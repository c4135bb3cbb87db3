"""The loss's kernel compiles for every architecture that it is meant for, and what it moves, without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config.objective import GPU_CHUNKS
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.softmax import candidate_loss
from support.forked import ROOT

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")

from support.operations import CountedKernel, OperationCounter  # imports the kernel


def test_the_kernel_spills_nothing_leaves_room_for_many_programs_and_moves_16_bytes_at_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/support/compiled_kernel.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["sm"] for kernel in kernels} == {80, 90, 100}
    assert len(kernels) == 15
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 64
        assert kernel["spilled"] == 0
        assert kernel["shared"] <= 1024
        assert kernel["blocks"] >= 8
        assert kernel["ld"] == 16, "whatever the number of candidates"
        assert kernel["st"] == 16 or "residuals" not in kernel["way"]


def kernel_loss(outputs_ND: Tensor, rows_UD: Tensor, target_N: Tensor) -> Tensor:
    bias_U = torch.empty(len(rows_UD), device=rows_UD.device)
    return candidate_loss(outputs_ND, rows_UD, Candidates(None, bias_U, target_N)) / len(target_N)


def plain_loss(outputs_ND: Tensor, rows_UD: Tensor, target_N: Tensor) -> Tensor:
    return F.cross_entropy(outputs_ND @ rows_UD.T, target_N)


def count(loss: Callable[..., Tensor], outputs: int, candidates: int, features: int) -> OperationCounter:
    """What forward and backward in bf16 would launch and move."""
    from megahead.losses import triton_kernel

    shapes = (outputs, features), (candidates, features)
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    target_N = torch.empty(outputs, device="meta", dtype=torch.int64)
    counter = OperationCounter()
    with (
        mock.patch.object(fused_softmax, "supports_kernel", return_value=True),
        mock.patch.object(triton_kernel, "_softmax_kernel", CountedKernel(counter)),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),  # it does not know the meta device
        counter,
    ):
        torch.autograd.grad(loss(*inputs, target_N), inputs)
    return counter


@pytest.mark.parametrize("outputs", [4096, 16384, 65536])
@pytest.mark.parametrize(("candidates", "features"), [(1536, 512), (16384, 1024), (50304, 512), (262144, 1024)])
def test_a_loss_moves_less_than_the_plain_form_and_in_one_chunk_launches_nothing_more_but_its_mean(
    outputs: int, candidates: int, features: int
) -> None:
    """Twelve bytes a score, of which a GPU's cache may serve two, and not eighteen."""
    ours, plain = (count(loss, outputs, candidates, features) for loss in (kernel_loss, plain_loss))
    scores, one_chunk = outputs * candidates, 2 * outputs * candidates <= GPU_CHUNKS.score_bytes
    assert ours.bytes < 0.85 * plain.bytes
    assert not one_chunk or ours.operations <= plain.operations + 3
    assert not one_chunk or ours.bytes - 12 * scores <= 6 * 4 * (outputs + candidates) * features
