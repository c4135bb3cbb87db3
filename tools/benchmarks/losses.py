"""The loss alone, forward and backward, timed and weighed: what tools/bench_loss.py does for each size."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.device import describe, matrix_rate
from benchmarks.loss_forms import FORMS, Entry, Form, Problem, errors
from benchmarks.memory import Cost, cost, in_child
from benchmarks.prepared_losses import Kernel, kernels_here, prepared
from benchmarks.targets import ERROR_SIZE, VOCABULARY
from megahead.report.tables import to_json, to_rich
from megahead.terminal import terminal

TOO_LARGE = "too large"
WARM_UP, PASSES = 3, 20
"""On a GPU: passes before those that are timed, in which kernels are compiled and tuned; passes in a row."""


class Taken(NamedTuple):
    """What a pass took."""

    seconds: float
    mebibytes: float
    """At most, above what was there before."""

    host_seconds: float | None = None
    """Until the host had asked a GPU for all of it; where that is more, the GPU waits."""


def compare(targets: Tensor, arguments: argparse.Namespace) -> None:
    """Times every form at every size, on the device of `targets`, and tells; then errors against float64. What is known
    is written to `arguments.output` as soon as it is known."""
    device, dtype = targets.device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    kernels: dict[str, Kernel] | None = None
    absent: list[str] = []
    if device.type == "cuda":
        kernels, absent = kernels_here(Problem.drawn(targets[:256], VOCABULARY, arguments.hidden[0], dtype))
    rate = device_rate(device, arguments.precision)
    console = terminal(width=160)
    console.print(f"{arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *absent]))
    found: list[dict[str, object]] = []
    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        lines = []
        for size in arguments.sizes:
            problem = Problem.drawn(targets[:size], VOCABULARY, hidden, dtype)
            costs = costs_of(entries_of(problem, kernels), arguments)
            lines.append(row(problem, costs, rate))
            found += records(problem, costs, rate)
            _save(found, arguments.output)
        console.print(to_rich(lines))
    size = min(ERROR_SIZE, *arguments.sizes)
    problem = Problem.drawn(targets[:size], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {size:,}, hidden {arguments.hidden[0]}")
    wrong = list(errors(entries_of(problem, kernels)))
    console.print(to_rich(wrong))
    _save(found + wrong, arguments.output)


def entries_of(problem: Problem, kernels: dict[str, Kernel] | None) -> list[Entry]:
    """What takes part; `kernels`: other people's, on a GPU."""
    if kernels is not None:
        return prepared(problem, kernels)
    return [Entry(name, form, problem) for name, form in FORMS.items()]


def costs_of(entries: list[Entry], arguments: argparse.Namespace) -> dict[str, Taken | None]:
    """Medians of what each form took, in turn; None where a GPU's memory does not hold it."""
    most = arguments.plain_up_to
    entries = [one for one in entries if one.name != "softmax, plain" or len(one.problem.targets) <= most]
    measured: dict[str, list[Taken]] = {entry.name: [] for entry in entries}
    too_large: set[str] = set()
    for _ in range(arguments.rounds):
        for name, form, problem in [entry for entry in entries if entry.name not in too_large]:
            try:
                measured[name].append(observe(form, problem))
            except torch.OutOfMemoryError:
                too_large.add(name)
                torch.cuda.empty_cache()
    return {name: None if name in too_large else _median(taken) for name, taken in measured.items()}


def _median(taken: list[Taken]) -> Taken:
    seconds, mebibytes, host = zip(*taken, strict=True)
    known = [value for value in host if value is not None]
    return Taken(statistics.median(seconds), statistics.median(mebibytes), statistics.median(known) if known else None)


def row(problem: Problem, costs: dict[str, Taken | None], rate: float) -> dict[str, object]:
    """One N: our median time, its share of the matrix rate by three products of N x U x D, our memory; and every other
    form's ratio to ours."""
    ours = costs["ours"]
    line: dict[str, object] = {"N": len(problem.targets), "U": len(problem.targets.unique())}
    if ours is None:
        return line | {"s": TOO_LARGE}
    line |= {
        "s": f"{ours.seconds:.3g}",
        "of rate": f"{_share(problem, ours, rate):.0%}",
        "MiB": f"{ours.mebibytes:,.0f}",
    }
    if ours.host_seconds is not None:
        line["host s"] = f"{ours.host_seconds:.3g}"
    for name, theirs in costs.items():
        if name != "ours":
            ratios = theirs and (theirs.seconds / ours.seconds, theirs.mebibytes / ours.mebibytes)
            line[name] = f"{ratios[0]:.1f}x {ratios[1]:.1f}x" if ratios else TOO_LARGE
    return line


def records(problem: Problem, costs: dict[str, Taken | None], rate: float) -> list[dict[str, object]]:
    """The same with exact numbers, a line for each form."""
    what = {"N": len(problem.targets), "U": len(problem.targets.unique()), "hidden": problem.outputs.shape[1]}
    lines: list[dict[str, object]] = []
    for name, found in costs.items():
        seconds, mebibytes, host = found or (None, None, None)
        lines.append(what | {"form": name, "seconds": seconds, "MiB": mebibytes, "host seconds": host})
        if found and name == "ours":
            lines[-1]["of rate"] = _share(problem, found, rate)
    return lines


def _share(problem: Problem, ours: Taken, rate: float) -> float:
    """Of the matrix rate, by the three products of N x U x D that the headless loss needs."""
    return 6 * problem.outputs.numel() * len(problem.targets.unique()) / ours.seconds / rate


def observe(form: Form, problem: Problem) -> Taken:
    """Of one forward and backward pass, wherever the problem lies."""
    if problem.outputs.is_cuda:
        return measure_on_gpu(form, problem)
    return Taken(*in_child(lambda: measure(form, *problem)))


def measure_on_gpu(form: Form, problem: Problem) -> Taken:
    """The mean of many passes in a row, which nothing but the last waits for, by the device's own clock."""
    for _ in range(WARM_UP):
        problem.solved(form)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.solved(form)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(PASSES):
        problem.solved(form)
    end.record()
    host = time.perf_counter() - start
    end.synchronize()
    return Taken(begin.elapsed_time(end) / 1e3 / PASSES, peak, host / PASSES)


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
