"""DeepSpeed's settings if a run gives none: gradient buckets and their communication, by device.

Those for CPUs were measured (docs/performance.md). Those for CUDA follow from DeepSpeed 0.19's sources; no GPU has
measured them yet. All compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CPU_BUCKET = 500_000
"""Gradients with more numbers than this are reduced in place, without a bucket: on a CPU a copy costs more than another
message."""

_CUDA_BUCKET = 50_000_000
"""100 MB in bf16: large enough for the links' full bandwidth, and only the rest of the last bucket is sent after the
backward pass. With buckets of a few MB the host could not run far ahead of the device."""


def tuned_settings(zero: Mapping[str, Any], device: str, precision: str, data_ranks: int) -> dict[str, Any]:
    """Defaults for a DeepSpeed JSON whose section `zero_optimization` is `zero`; `device`: cpu or cuda.

    At stage 1 in bf16 DeepSpeed uses no buckets: it sums gradients in one fp32 tensor, and sends that at the end.
    """
    stage = zero.get("stage", 0)
    settings: dict[str, Any] = {"zero_optimization": _on_cuda(stage) if device == "cuda" else _on_cpu(stage)}
    if stage == 1 and precision == "bf16" and "offload_optimizer" not in zero:
        if data_ranks == 1:  # nothing is sent: there is no reason to round sums to bf16 and back
            settings["communication_data_type"] = "fp32"
        if device == "cuda":  # each gradient is added to its sum and freed while the backward pass goes on
            settings["bf16"] = {"immediate_grad_update": True}
    return settings


def _on_cpu(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"reduce_bucket_size": _CPU_BUCKET}
    if stage in (1, 2):
        zero |= {"contiguous_gradients": False} | _REDUCED_WHOLE
    return zero


def _on_cuda(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"reduce_bucket_size": _CUDA_BUCKET}
    if stage in (1, 2):
        # sent beside the backward pass, from buffers of their own: without these each bucket waits for the device
        zero |= {"overlap_comm": True, "contiguous_gradients": True} | _REDUCED_WHOLE
    return zero  # DeepSpeed's own defaults overlap at stage 3


_REDUCED_WHOLE = {"reduce_scatter": False}
"""DeepSpeed's `reduce_scatter: true` does not scatter either: it flattens, all-reduces, and copies back."""
