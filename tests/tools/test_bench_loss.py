"""The benchmark of the loss compares what is equal, and sees memory that is used."""

from __future__ import annotations

import bench_loss
import torch
from torch import Tensor


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(30, 6, generator=generator, requires_grad=True)
    table = torch.randn(40, 6, generator=generator, requires_grad=True)
    return outputs, torch.randint(40, (30,), generator=generator), table


def test_forms_that_are_compared_compute_the_same() -> None:
    outputs, targets, table = drawn()
    for fast, slow in (("ours", "paper"), ("softmax, ours", "softmax, plain")):
        losses = [bench_loss.FORMS[name](outputs, targets, table) for name in (fast, slow)]
        torch.testing.assert_close(*losses)
        gradients = [torch.autograd.grad(loss, [outputs, table]) for loss in losses]
        torch.testing.assert_close(*gradients)


def test_a_measurement_sees_the_memory_a_form_takes() -> None:
    def wasteful(outputs: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        waste = torch.ones(2**24 if len(targets) == 30 else 1)  # 64 MiB
        return (outputs.sum() + table.sum()) * waste[0]

    outputs, targets, table = drawn()
    seconds, mebibytes = bench_loss.in_child(lambda: bench_loss.measure(wasteful, outputs, targets, table))
    assert seconds > 0
    assert 60 < mebibytes < 100
