"""The loss alone, forward and backward, timed and weighed: what tools/bench_loss.py does for each size."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.device import describe, matrix_rate
from benchmarks.loss_forms import FORMS, Form, Problem, errors, with_others
from benchmarks.memory import Cost, cost, in_child
from benchmarks.targets import ERROR_SIZE, VOCABULARY
from megahead.report import to_rich


def compare(targets: Tensor, arguments: argparse.Namespace) -> None:
    """Times every form at every size, on the device of `targets`, and tells; then errors against float64."""
    device = targets.device
    forms, absent = with_others() if device.type == "cuda" else (FORMS, [])
    rate = device_rate(device, arguments.precision)
    console = Console(highlight=False, width=160)
    console.print(f"{arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *absent]))
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        problems = (Problem.drawn(targets[:size], VOCABULARY, hidden, dtype) for size in arguments.sizes)
        console.print(to_rich([row(problem, forms, rate, arguments) for problem in problems]))
    problem = Problem.drawn(targets[:ERROR_SIZE], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {ERROR_SIZE:,}, hidden {arguments.hidden[0]}")
    console.print(to_rich(list(errors(forms, problem))))


def row(problem: Problem, forms: dict[str, Form], rate: float, arguments: argparse.Namespace) -> dict[str, object]:
    """One N: our median time, its share of the matrix rate by three products of N x U x D, our memory; and every other
    form's ratio to ours."""
    size, hidden = problem.outputs.shape
    forms = {name: form for name, form in forms.items() if name != "softmax, plain" or size <= arguments.plain_up_to}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(arguments.rounds):
        for name, form in forms.items():
            measured[name].append(observe(form, problem))
    candidates = len(problem.targets.unique())
    ours = [statistics.median(column) for column in zip(*measured["ours"], strict=True)]
    line: dict[str, object] = {"N": size, "U": candidates, "s": f"{ours[0]:.3g}"}
    line |= {"of rate": f"{6 * size * candidates * hidden / ours[0] / rate:.0%}", "MiB": f"{ours[1]:,.0f}"}
    for name, results in measured.items():
        if name != "ours":
            seconds, mebibytes = (statistics.median(column) for column in zip(*results, strict=True))
            line[name] = f"{seconds / ours[0]:.1f}x {mebibytes / ours[1]:.1f}x"
    return line


def observe(form: Form, problem: Problem) -> Cost:
    """(seconds, peak MiB above what was there before) of one forward and backward pass, wherever the problem lies."""
    if problem.outputs.is_cuda:
        return measure_on_gpu(form, problem)
    return in_child(lambda: measure(form, *problem))


def measure_on_gpu(form: Form, problem: Problem) -> Cost:
    """After a pass that is not measured, in which kernels are compiled and tuned."""
    problem.solved(form)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    problem.solved(form)
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**20


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
