"""What tools/bench_loss.py compares: ways to compute the headless loss, or the full softmax, and how far off they are.

N outputs, D features, U candidates, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.objectives import candidate_loss, cwt_loss, unique_candidates, vocabulary_candidates

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From outputs [N, D], targets [N] and the table [V, D] to the mean loss."""


def paper(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """N x N scores against the targets' embeddings, duplicates and all."""
    scores_NN = outputs_ND @ table_VD[targets_N].T
    return F.cross_entropy(scores_NN, torch.arange(len(targets_N), device=targets_N.device))


def plain_softmax(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """N x V scores."""
    return F.cross_entropy(outputs_ND @ table_VD.T, targets_N)


def our_softmax(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The same, by the path that the headless loss takes."""
    return candidate_loss(outputs_ND, table_VD, vocabulary_candidates(targets_N)) / len(targets_N)


HEADLESS: dict[str, Form] = {"ours": cwt_loss, "paper": paper}
SOFTMAX: dict[str, Form] = {"softmax, ours": our_softmax, "softmax, plain": plain_softmax}
FORMS = HEADLESS | SOFTMAX

OTHERS = {
    "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    "cut": ("cut_cross_entropy", "linear_cross_entropy"),
}
"""Kernels of other people for CUDA, Liger's and Apple's: the mean cross-entropy of `(outputs, rows, own places)`, and
`bias=` of the rows, which Apple's has in its repository, but not on PyPI (25.1)."""

FEATURES = 16
"""So many more carry the bias where a kernel takes none: the number stays a multiple of what it moves at once."""


def with_others(small: Problem) -> tuple[dict[str, Form], list[str]]:
    """`FORMS` and those of other people that solve a small problem here; a line for each that does not."""
    kernels, absent = {}, []
    for name, (module, function) in OTHERS.items():
        try:
            kernel = getattr(importlib.import_module(module), function)
            for by in (headless_by, softmax_by):
                small.solved(partial(by, kernel))
            kernels[name] = kernel
        except Exception as error:  # what is not installed, and what fails in any way of its own
            absent.append(f"without {name}: {' '.join(str(error).split())[:200]}")
    headless = {name: partial(headless_by, kernel) for name, kernel in kernels.items()}
    softmax = {f"softmax, {name}": partial(softmax_by, kernel) for name, kernel in kernels.items()}
    return {**HEADLESS, **headless, **SOFTMAX, **softmax}, absent


def headless_by(kernel: Callable[..., Tensor], outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The unique targets, with the log of their counts as bias, by another's kernel, which counts own biases too."""
    chosen = unique_candidates(targets_N)
    assert chosen.ids_U is not None
    assert chosen.bias_U is not None
    rows_UD, bias_U = table_VD[chosen.ids_U], chosen.bias_U.to(outputs_ND.dtype)
    if "bias" in inspect.signature(kernel).parameters:
        loss = kernel(outputs_ND, rows_UD, chosen.positive_N, bias=bias_U)
    else:
        ones_NF = outputs_ND.new_ones(len(outputs_ND), 1)
        outputs_ND, rows_UD = (
            torch.cat([features, F.pad(more, (0, FEATURES - 1))], dim=1)
            for features, more in ((outputs_ND, ones_NF), (rows_UD, bias_U[:, None]))
        )
        loss = kernel(outputs_ND, rows_UD, chosen.positive_N)
    return loss + chosen.bias_U[chosen.positive_N].mean().float()


def softmax_by(kernel: Callable[..., Tensor], outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The full softmax by another's kernel."""
    return kernel(outputs_ND, table_VD, targets_N)


class Problem(NamedTuple):
    """What every form begins with."""

    outputs: Tensor
    targets: Tensor
    table: Tensor

    @staticmethod
    def drawn(targets: Tensor, vocabulary: int, hidden: int, dtype: torch.dtype) -> Problem:
        """The same numbers each time, on the targets' device."""
        generator = torch.Generator().manual_seed(len(targets))
        outputs = torch.randn(len(targets), hidden, generator=generator)
        table = torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5
        outputs, table = (tensor.to(targets.device, dtype).requires_grad_() for tensor in (outputs, table))
        return Problem(outputs, targets, table)

    def solved(self, form: Form) -> list[Tensor]:
        """The loss, and the gradients of outputs and table."""
        loss = form(*self)
        return [loss.detach(), *torch.autograd.grad(loss, [self.outputs, self.table])]

    def exactly(self, form: Form) -> list[Tensor]:
        """The same in float64."""
        outputs, table = (tensor.detach().double().requires_grad_() for tensor in (self.outputs, self.table))
        return Problem(outputs, self.targets, table).solved(form)


def errors(forms: dict[str, Form], problem: Problem) -> Iterator[dict[str, Any]]:
    """A line for each form: relative errors of its loss and (in norm) of its gradients against float64."""
    exact = {name: problem.exactly(form) for name, form in (("", paper), ("softmax", plain_softmax))}
    for name, form in forms.items():
        truth = exact["softmax" if name.startswith("softmax") else ""]
        apart = [
            (mine.double() - true).norm() / true.norm() for mine, true in zip(problem.solved(form), truth, strict=True)
        ]
        loss, of_outputs, of_table = (f"{float(error):.1e}" for error in apart)
        yield {"form": name, "loss": loss, "gradient of outputs": of_outputs, "of the table": of_table}
