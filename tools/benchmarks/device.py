"""What a device is called, and what it can reach."""

from __future__ import annotations

import time

import torch


def matrix_rate(device: torch.device, precision: str, size: int | None = None) -> float:
    """Operations a second of a square product, the best of five: what the device can reach."""
    size = size or (8192 if device.type == "cuda" else 2048)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def describe(device: torch.device) -> str:
    """The device's name, or how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"
