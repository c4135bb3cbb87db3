"""What tools/bench_loss.py compares: the headless loss and the full softmax, forward and backward, timed and weighed.

On a CPU a form begins with the table. On a GPU it begins as in a step: candidates were chosen by the loader, and their
rows looked up before; so what is timed waits for nothing. N outputs, D features, U candidates, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_loss import ERROR_SIZE, VOCABULARY
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Cost, DeviceClock, cost, describe, in_child, interleaved, matrix_rate
from megahead.config.objective import ObjectiveConfig
from megahead.losses.candidates import Candidates, vocabulary_candidates
from megahead.losses.contrastive import build_objective, cwt_loss
from megahead.losses.softmax import candidate_loss
from megahead.objectives.micro_batch import CANDIDATE_MULTIPLE
from megahead.report.tables import to_json, to_rich
from megahead.terminal import terminal

# From outputs [N, D], targets [N] and the table [V, D] to the mean loss
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


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


# The mean cross-entropy of `(outputs, rows, own places)`, and perhaps of `bias=` of the rows
Kernel = Callable[..., Tensor]
OTHERS = {
    "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    "cut": ("cut_cross_entropy", "linear_cross_entropy"),
}
"""Kernels of other people for CUDA, Liger's and Apple's; the latter's takes a bias in its repository, but not on PyPI
(25.1)."""

# So many more carry the bias where a kernel takes none: the number stays a multiple of what it moves at once
FEATURES = 16


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


def as_they_are(problem: Problem) -> list[Entry]:
    """Every form, which begins with the table."""
    return [Entry(name, form, problem) for name, form in FORMS.items()]


def prepared(problem: Problem, kernels: Mapping[str, Kernel]) -> list[Entry]:
    """Every form with what it begins with: ours with candidates padded as the loader pads them, the others without."""
    among = chosen(problem.targets)
    padded = among.pad_to_multiple(CANDIDATE_MULTIPLE)
    entries = [
        Entry("ours", partial(ours, padded.to(problem.outputs.device)), looked_up(problem, padded)),
        Entry("paper", paper, looked_up(problem, among)),
        *(Entry(name, form, problem) for name, form in SOFTMAX.items()),
        *_of_others(problem, among, kernels),
    ]
    return sorted(entries, key=lambda entry: entry.name.startswith("softmax"))


def chosen(targets_N: Tensor) -> Candidates:
    """The headless candidates of these targets, on the CPU, where the loader chooses them."""
    targets_N = targets_N.cpu()
    return build_objective(ObjectiveConfig(), VOCABULARY).candidate_set(targets_N).candidates(targets_N)


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


TOO_LARGE = "too large"
# On a GPU: passes before those that are timed, in which kernels are compiled and tuned; passes in a row
WARM_UP, PASSES = 3, 20


class Taken(NamedTuple):
    """What a pass took."""

    seconds: float
    mebibytes: float  # at most, above what was there before
    host_seconds: float | None = None  # until the host had launched all of it; where that is more, the GPU waits

    @staticmethod
    def median_of(taken: Sequence[Taken | None]) -> Taken | None:
        """None where one of them is missing."""
        there = [one for one in taken if one is not None]
        if len(there) < len(taken):
            return None
        return Taken(*(None if None in values else median(values) for values in zip(*there, strict=True)))  # type: ignore[arg-type, type-var]


def compare(targets: Tensor, arguments: argparse.Namespace) -> None:
    """Times every form at every size, on the device of `targets`; then errors against float64. Prints all, and
    writes it to `arguments.output` as soon as it is known."""
    device, dtype = targets.device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    absent: list[str] = []
    entries_of: Callable[[Problem], list[Entry]] = as_they_are
    if device.type == "cuda":  # other people's are for GPUs
        kernels, absent = kernels_here(Problem.drawn(targets[:256], VOCABULARY, arguments.hidden[0], dtype))
        entries_of = partial(prepared, kernels=kernels)
    rate = device_rate(device, arguments.precision)
    console = terminal(width=160)
    console.print(f"{arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *absent]))
    found: list[dict[str, object]] = []

    def keep(lines: list[dict[str, object]]) -> None:
        found.extend(lines)
        if arguments.output is not None:
            arguments.output.write_text(to_json(found), encoding="utf-8")

    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        lines = []
        for size in arguments.sizes:
            problem = Problem.drawn(targets[:size], VOCABULARY, hidden, dtype)
            found_here = records(problem, costs_of(entries_of(problem), arguments), rate)
            lines.append(row(found_here))
            keep(found_here)
        console.print(to_rich(lines))
    size = min(ERROR_SIZE, *arguments.sizes)
    problem = Problem.drawn(targets[:size], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {size:,}, hidden {arguments.hidden[0]}")
    wrong = list(errors(entries_of(problem)))
    console.print(to_rich(wrong))
    keep(wrong)


def costs_of(entries: list[Entry], arguments: argparse.Namespace) -> dict[str, Taken | None]:
    """Medians of what each form took, in turn; None where a GPU's memory does not hold it."""
    most = arguments.plain_up_to
    entries = [one for one in entries if one.name != "softmax, plain" or len(one.problem.targets) <= most]
    too_large: set[str] = set()

    def take(entry: Entry) -> Taken | None:
        if entry.name not in too_large:
            try:
                return observe(entry.form, entry.problem)
            except torch.OutOfMemoryError:
                too_large.add(entry.name)
                torch.cuda.empty_cache()
        return None

    rounds = interleaved([lambda _, one=one: take(one) for one in entries], arguments.rounds, warm_up=0)  # type: ignore[misc]
    medians = [Taken.median_of(taken) for taken in zip(*rounds, strict=True)]
    return dict(zip((entry.name for entry in entries), medians, strict=True))


def records(problem: Problem, costs: dict[str, Taken | None], rate: float) -> list[dict[str, Any]]:
    """A line for each form; ours has its share of the matrix rate by the three products of N x U x D that it needs."""
    size, candidates, hidden = len(problem.targets), len(problem.targets.unique()), problem.outputs.shape[1]
    lines: list[dict[str, Any]] = []
    for name, found in costs.items():
        seconds, mebibytes, host = found or (None, None, None)
        line = {"N": size, "U": candidates, "hidden": hidden, "form": name}
        lines.append(line | {"seconds": seconds, "MiB": mebibytes, "host seconds": host})
        if seconds and name == "ours":
            lines[-1]["of rate"] = 6 * size * candidates * hidden / seconds / rate
    return lines


def row(lines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The lines of one N as one: ours, and how many times as long and as much memory every other form takes."""
    by_form = {line["form"]: line for line in lines}
    ours = by_form.pop("ours")
    line: dict[str, object] = {"N": ours["N"], "U": ours["U"]}
    if ours["seconds"] is None:
        return line | {"s": TOO_LARGE}
    line |= {"s": f"{ours['seconds']:.3g}", "of rate": f"{ours['of rate']:.0%}", "MiB": f"{ours['MiB']:,.0f}"}
    if ours["host seconds"] is not None:
        line["host s"] = f"{ours['host seconds']:.3g}"
    for name, theirs in by_form.items():
        fits = theirs["seconds"] is not None
        ratios = [f"{theirs[what] / ours[what]:.1f}x" for what in ("seconds", "MiB") if fits]
        line[name] = " ".join(ratios) or TOO_LARGE
    return line


def observe(form: Form, problem: Problem) -> Taken:
    """Of one forward and backward pass, wherever the problem lies."""
    if problem.outputs.is_cuda:
        return measure_on_gpu(form, problem)
    return Taken(*in_child(lambda: measure(form, *problem)))


def measure_on_gpu(form: Form, problem: Problem) -> Taken:
    """The mean of many passes in a row, which nothing but the last waits for, by the device's own clock."""
    clock = DeviceClock()
    for _ in range(WARM_UP):
        problem.solved(form)
    clock.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.solved(form)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    start, begin = time.perf_counter(), clock.now()
    for _ in range(PASSES):
        problem.solved(form)
    end, host = clock.now(), time.perf_counter() - start
    clock.wait()
    return Taken(clock.seconds(begin, end) / PASSES, peak, host / PASSES)


def device_rate(device: torch.device, precision: str) -> float:
    """What `matrix_rate` finds; on a CPU in a child, as threads that have computed do not survive a fork."""
    if device.type == "cuda":
        return matrix_rate(device, precision)
    return in_child(lambda: matrix_rate(device, precision))


def measure(form: Form, outputs: Tensor, targets: Tensor, table: Tensor) -> Cost:
    """One pass on the CPU, in a process that does nothing else."""
    small = outputs[:64].detach().requires_grad_()
    torch.autograd.grad(form(small, targets[:64], table[:, : small.shape[1]]), [small])  # threads and libraries awake
    return cost(lambda: torch.autograd.grad(form(outputs, targets, table), [outputs, table]))
