"""Numbers as people read them: durations, counts, sizes. The one place for each."""

from __future__ import annotations

import math

GIB = 2**30


def duration(seconds: float) -> str:
    """0.42 -> 0.4s, 75 -> 1m15s, 7,500 -> 2h05m, 200,000 -> 2d07h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def thousands(value: float) -> str:
    """12345 -> 12.3k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def gib(size: float, decimals: int = 2) -> str:
    """Bytes as GiB: 1,610,612,736 -> 1.50 GiB."""
    return f"{size / GIB:,.{decimals}f} GiB"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
