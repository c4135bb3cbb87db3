"""The losses as a step on a GPU has them: candidates were chosen by the feed, and their rows looked up before.

So what is timed begins with outputs and rows, ends with the gradients of both, and waits for nothing; the same for the
kernels of other people. N outputs, D features, U candidates.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.loss_forms import SOFTMAX, Entry, Problem, paper
from benchmarks.targets import VOCABULARY
from megahead.config.objective import ObjectiveConfig
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.softmax import candidate_loss
from megahead.objectives.micro_batch import CANDIDATE_MULTIPLE

Kernel = Callable[..., Tensor]
"""The mean cross-entropy of `(outputs, rows, own places)`, and perhaps of `bias=` of the rows."""

OTHERS = {
    "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    "cut": ("cut_cross_entropy", "linear_cross_entropy"),
}
"""Kernels of other people for CUDA, Liger's and Apple's; the latter's takes a bias in its repository, but not on PyPI
(25.1)."""

FEATURES = 16
"""So many more carry the bias where a kernel takes none: the number stays a multiple of what it moves at once."""


def kernels_here(small: Problem) -> tuple[dict[str, Kernel], list[str]]:
    """Those of other people that solve a small problem here; a line for each that does not."""
    kernels, absent = {}, []
    for name, (module, function) in OTHERS.items():
        try:
            kernel = getattr(importlib.import_module(module), function)
            for entry in _of_others(small, chosen(small.targets), {name: kernel}):
                entry.problem.solved(entry.form)
            kernels[name] = kernel
        except Exception as error:  # what is not installed, and what fails in any way of its own
            absent.append(f"without {name}: {' '.join(str(error).split())[:200]}")
    return kernels, absent


def prepared(problem: Problem, kernels: Mapping[str, Kernel]) -> list[Entry]:
    """Every form with what it begins with: ours with candidates padded as the feed pads them, the others without."""
    among = chosen(problem.targets)
    padded = among.padded(CANDIDATE_MULTIPLE)
    entries = [
        Entry("ours", partial(ours, padded.to(problem.outputs.device)), looked_up(problem, padded)),
        Entry("paper", paper, looked_up(problem, among)),
        *(Entry(name, form, problem) for name, form in SOFTMAX.items()),
        *_of_others(problem, among, kernels),
    ]
    return sorted(entries, key=lambda entry: entry.name.startswith("softmax"))


def chosen(targets_N: Tensor) -> Candidates:
    """The headless candidates of these targets, on the CPU, where the feed chooses them."""
    targets_N = targets_N.cpu()
    return build_objective(ObjectiveConfig(), VOCABULARY).pool(targets_N).candidates(targets_N)


def looked_up(problem: Problem, among: Candidates) -> Problem:
    """The same with the candidates' rows in place of the table."""
    assert among.ids_U is not None
    device = problem.outputs.device
    rows_UD = problem.table.detach()[among.ids_U.to(device)].requires_grad_()
    return Problem(problem.outputs, among.target_N.to(device), rows_UD)


def ours(among: Candidates, outputs_ND: Tensor, own_N: Tensor, rows_UD: Tensor) -> Tensor:
    """What a step computes."""
    return candidate_loss(outputs_ND, rows_UD, among) / len(own_N)


def _of_others(problem: Problem, among: Candidates, kernels: Mapping[str, Kernel]) -> list[Entry]:
    rows, among = looked_up(problem, among), among.to(problem.outputs.device)
    headless = [Entry(name, partial(headless_by, kernel, among), rows) for name, kernel in kernels.items()]
    return headless + [
        Entry(f"softmax, {name}", partial(softmax_by, kernel), problem) for name, kernel in kernels.items()
    ]


def headless_by(kernel: Kernel, among: Candidates, outputs_ND: Tensor, own_N: Tensor, rows_UD: Tensor) -> Tensor:
    """With the log of counts as bias, by another's kernel, which counts own biases too."""
    assert among.bias_U is not None
    bias_U = among.bias_U.to(outputs_ND.dtype)
    if "bias" in inspect.signature(kernel).parameters:
        loss = kernel(outputs_ND, rows_UD, own_N, bias=bias_U)
    else:
        ones_NF = outputs_ND.new_ones(len(outputs_ND), 1)
        outputs_ND, rows_UD = (
            torch.cat([features, F.pad(more, (0, FEATURES - 1))], dim=1)
            for features, more in ((outputs_ND, ones_NF), (rows_UD, bias_U[:, None]))
        )
        loss = kernel(outputs_ND, rows_UD, own_N)
    return loss + among.bias_U[own_N].mean().float()


def softmax_by(kernel: Kernel, outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The full softmax by another's kernel."""
    return kernel(outputs_ND, table_VD, targets_N)
