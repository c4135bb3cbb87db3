"""What a launch costs the host: an operator, the loss's Triton kernel, the replay of a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.timing import run_interleaved
from megahead.losses.candidates import vocabulary_candidates
from megahead.losses.softmax import candidate_loss

CALLS = 1000  # of an operator a round; few enough for a device's queue of launches
SIZE = 16  # small: the device is done before the next launch


def time_launches(device_name: str, rounds: int) -> list[dict[str, object]]:
    """A line for each kind of launch: the host's microseconds a launch, and with the wait for the device."""
    device = torch.device(device_name)
    x = torch.zeros(SIZE, device=device)

    def add() -> None:
        for _ in range(CALLS):
            x.add_(1)

    kinds: dict[str, Callable[[], object]] = {f"operator, {CALLS:,} a call": add}
    if device.type == "cuda":
        kinds[f"graph of {CALLS:,} operators"] = _captured(add)
    kinds[f"loss of {SIZE} outputs, forward and backward"] = _loss_step(device)
    taken = run_interleaved([lambda _, call=call: _seconds(call, device) for call in kinds.values()], rounds, 3)  # type: ignore[misc]
    return [
        {
            "": name,
            "host, us a call": round(1e6 * median(host for host, _ in seconds), 1),
            "with the device": round(1e6 * median(both for _, both in seconds), 1),
        }
        for name, seconds in zip(kinds, zip(*taken, strict=True), strict=True)
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of the host until the call returns, and until the device is done."""
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return returned - start, time.perf_counter() - start


def _loss_step(device: torch.device) -> Callable[[], None]:
    """The headless loss, by the Triton kernel on a GPU."""
    outputs_ND, rows_UD = (torch.randn(SIZE, SIZE, device=device, requires_grad=True) for _ in range(2))
    candidates = vocabulary_candidates(torch.arange(SIZE, device=device))

    def step() -> None:
        candidate_loss(outputs_ND, rows_UD, candidates).backward()

    return step


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay
