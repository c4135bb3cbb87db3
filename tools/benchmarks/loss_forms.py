"""What tools/bench_loss.py compares: ways to compute the headless loss, or the full softmax, and how far off they are.

N outputs, D features, U candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.losses.candidates import vocabulary_candidates
from megahead.losses.contrastive import cwt_loss
from megahead.losses.softmax import candidate_loss

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


class Entry(NamedTuple):
    """One of those that are compared: a form, and what it begins with."""

    name: str
    form: Form
    problem: Problem


def errors(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """A line for each form: relative errors of its loss and (in norm) of its gradients against float64."""
    for name, form, problem in entries:
        truth = problem.exactly(plain_softmax if name.startswith("softmax") else paper)
        apart = [
            (mine.double() - true).norm() / true.norm() for mine, true in zip(problem.solved(form), truth, strict=True)
        ]
        loss, of_outputs, of_table = (f"{float(error):.1e}" for error in apart)
        yield {"form": name, "loss": loss, "gradient of outputs": of_outputs, "of the table": of_table}
