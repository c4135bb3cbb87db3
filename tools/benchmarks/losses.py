"""The loss alone, forward and backward, timed and weighed: what tools/bench_loss.py does for each size."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.device import describe, matrix_rate
from benchmarks.loss_forms import FORMS, Form, Problem, errors, with_others
from benchmarks.memory import Cost, cost, in_child
from benchmarks.targets import ERROR_SIZE, VOCABULARY
from megahead.report import to_json, to_rich

TOO_LARGE = "too large"


def compare(targets: Tensor, arguments: argparse.Namespace) -> None:
    """Times every form at every size, on the device of `targets`, and tells; then errors against float64. What is known
    is written to `arguments.output` as soon as it is known."""
    device, dtype = targets.device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    forms = FORMS
    absent: list[str] = []
    if device.type == "cuda":
        forms, absent = with_others(Problem.drawn(targets[:256], VOCABULARY, arguments.hidden[0], dtype))
    rate = device_rate(device, arguments.precision)
    console = Console(highlight=False, width=160)
    console.print(f"{arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *absent]))
    found: list[dict[str, object]] = []
    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        lines = []
        for size in arguments.sizes:
            problem = Problem.drawn(targets[:size], VOCABULARY, hidden, dtype)
            costs = costs_of(forms, problem, arguments)
            lines.append(row(problem, costs, rate))
            found += records(problem, costs)
            _save(found, arguments.output)
        console.print(to_rich(lines))
    size = min(ERROR_SIZE, *arguments.sizes)
    problem = Problem.drawn(targets[:size], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {size:,}, hidden {arguments.hidden[0]}")
    wrong = list(errors(forms, problem))
    console.print(to_rich(wrong))
    _save(found + wrong, arguments.output)


def costs_of(forms: dict[str, Form], problem: Problem, arguments: argparse.Namespace) -> dict[str, Cost | None]:
    """Medians of each form's time and memory, taken in turn; None where a GPU's memory does not hold it."""
    size = len(problem.targets)
    forms = {name: form for name, form in forms.items() if name != "softmax, plain" or size <= arguments.plain_up_to}
    measured: dict[str, list[Cost]] = {name: [] for name in forms}
    too_large: set[str] = set()
    for _ in range(arguments.rounds):
        for name in [name for name in forms if name not in too_large]:
            try:
                measured[name].append(observe(forms[name], problem))
            except torch.OutOfMemoryError:
                too_large.add(name)
                torch.cuda.empty_cache()
    return {name: None if name in too_large else _median(costs) for name, costs in measured.items()}


def _median(costs: list[Cost]) -> Cost:
    seconds, mebibytes = (statistics.median(column) for column in zip(*costs, strict=True))
    return seconds, mebibytes


def row(problem: Problem, costs: dict[str, Cost | None], rate: float) -> dict[str, object]:
    """One N: our median time, its share of the matrix rate by three products of N x U x D, our memory; and every other
    form's ratio to ours."""
    size, hidden = problem.outputs.shape
    ours, candidates = costs["ours"], len(problem.targets.unique())
    line: dict[str, object] = {"N": size, "U": candidates}
    if ours is None:
        return line | {"s": TOO_LARGE}
    line["s"] = f"{ours[0]:.3g}"
    line |= {"of rate": f"{6 * size * candidates * hidden / ours[0] / rate:.0%}", "MiB": f"{ours[1]:,.0f}"}
    for name, theirs in costs.items():
        if name != "ours":
            line[name] = f"{theirs[0] / ours[0]:.1f}x {theirs[1] / ours[1]:.1f}x" if theirs else TOO_LARGE
    return line


def records(problem: Problem, costs: dict[str, Cost | None]) -> list[dict[str, object]]:
    """The same with exact numbers, a line for each form."""
    size, hidden = problem.outputs.shape
    what = {"N": size, "U": len(problem.targets.unique()), "hidden": hidden}
    return [
        what | {"form": name, "seconds": found and found[0], "MiB": found and found[1]} for name, found in costs.items()
    ]


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


def _save(lines: list[dict[str, object]], output: Path | None) -> None:
    if output is not None:
        output.write_text(to_json(lines), encoding="utf-8")
