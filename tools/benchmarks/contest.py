"""Contenders take whole training steps in turn: A B A B ..., so that a noisy machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.contender import Contender, compare
from benchmarks.device import describe, matrix_rate
from benchmarks.memory import cost, in_child
from benchmarks.plans import How, Plan
from benchmarks.tokens import token_rows
from megahead.config.run import RunConfig
from megahead.report.tables import to_rich
from megahead.terminal import terminal


def hold(
    config: RunConfig, plans: Sequence[Plan], prefix: str | None, steps: int, device: torch.device
) -> list[dict[str, object]]:
    """Times `steps` steps of each plan on the same tokens (of the dataset `prefix`, or the config's), and tells; the
    table's lines."""
    rows = token_rows(config, prefix, count=(steps + 1) * config.batch.accumulation_steps(1))

    def contender(name: str, how: How) -> Contender:
        return Contender(config, name, device, rows, how)

    memory = [
        None
        if device.type == "cuda" or config.engine.compile is True or plan[1] == "compiled"
        else _peak_of_a_step(partial(contender, *plan))
        for plan in plans
    ]
    contenders = [contender(*plan) for plan in plans]
    for index in range(steps + 1):
        for one in contenders:
            one.step(index)
    rate = matrix_rate(device, config.engine.precision)
    peaks = [measured or one.peak_megabytes() for measured, one in zip(memory, contenders, strict=True)]
    lines = [one.row(rate, peak) for one, peak in zip(contenders, peaks, strict=True)]
    _print_results(contenders, lines, rate)
    return lines


def _peak_of_a_step(build: Callable[[], Contender]) -> float:
    """MB that a contender and its first step take on a CPU, in a process of its own."""
    _, mebibytes = in_child(lambda: cost(lambda: _stepped(build())))
    return mebibytes * 2**20 / 1e6


def _stepped(contender: Contender) -> Contender:
    contender.step(0)
    return contender


def _print_results(contenders: Sequence[Contender], lines: Sequence[dict[str, object]], rate: float) -> None:
    """What was timed, the table, and the ratios."""
    first, console = contenders[0], terminal()
    shape = f"{first.config.batch.micro_size} x {first.config.data.sequence_length} tokens"
    if first.accumulation > 1:
        shape = f"{first.accumulation} micro-batches of {shape}"
    machine = f"{first.precision} on {describe(first.device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate"
    console.print(f"{first.config.name}, {shape}, {machine}")
    for name, way in contenders[-1].ways:
        console.print(f"{name}: {way}")
    console.print(to_rich(lines))
    for other in contenders[1:]:
        console.print(compare(first, other))
