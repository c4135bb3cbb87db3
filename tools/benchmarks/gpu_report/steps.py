"""Whole steps of both objectives, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_report.part import Outcome


def steps_compared(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """How many times as fast a headless step is, beside what operations alone would give, and how much of the device it
    uses; plain and compiled."""
    rows = []
    for outcome in outcomes:
        lines = {str(line.get("objective")): line for line in outcome.lines or [] if "GFLOP" in line}
        for how in ("", ", compiled"):
            headless, vanilla = lines.get(f"headless{how}"), lines.get(f"vanilla{how}")
            if headless and vanilla:
                faster = vanilla["ms"] / headless["ms"]
                fewer = vanilla["GFLOP"] / headless["GFLOP"]
                row = {"part": outcome.name + how, "headless, ms": headless["ms"], "vanilla, ms": vanilla["ms"]}
                row |= {"times as fast": round(faster, 2), "by operations": round(fewer, 2)}
                rows.append(row | {"of it": f"{faster / fewer:.0%}"} | _shares(headless))
    return rows


def _shares(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line.get(name) for name in ("MFU", "of rate", "loss", "peak MB")}
