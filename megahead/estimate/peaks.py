"""Peak operations per second of devices.

Dense peaks in operations a second, as their makers state them (no sparsity): NVIDIA's data sheets of V100, T4, A10,
A100, RTX 3090 and 4090, L4, L40S, H100, H200 and B200.
"""

from __future__ import annotations

HALF_PRECISION_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""bf16 (fp16 where there is none), by words of the name that torch gives the device; the longest that fits counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations a second that the device can reach; None for one that is not listed, and for fp32."""
    names = [name for name in HALF_PRECISION_PEAKS if _fits(name, device_name)]
    if precision == "fp32" or not names:
        return None
    return HALF_PRECISION_PEAKS[max(names, key=len)]


def _fits(name: str, device_name: str) -> bool:
    """Whether the device's name has all words of `name`: "H100 PCIe" fits "NVIDIA H100 PCIe", "A10" not "A100"."""
    words = device_name.replace("-", " ").split()
    return all(word in words for word in name.split())
