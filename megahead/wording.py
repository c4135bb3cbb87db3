"""Writes numbers as people read them: 1 step, 2,000 steps; row 7, rows 7 to 9; 2h05m; 1.50 GiB."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

GIB = 2**30


def counted(number: float, thing: str, form: str = ",") -> str:
    """`number`, formatted by `form`, and its noun in singular or plural: `counted(2, "step")` is 2 steps."""
    shown = format(number, form)
    return f"{shown} {thing}" if shown == "1" else f"{shown} {thing}s"


def span(thing: str, numbers: range) -> str:
    """Names consecutive things: `span("row", range(7, 10))` is rows 7 to 9."""
    first, last = numbers.start, numbers.stop - 1
    return f"{thing} {first:,}" if first == last else f"{thing}s {first:,} to {last:,}"


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Asks whether the one of `known` that is spelled most like `word` was meant; empty where none is."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean `{prefix}{near[0]}`?" if near else ""


def listed(thing: str, numbers: Sequence[int]) -> str:
    """Names things by their numbers: rank 3, ranks 0, 3."""
    return f"{thing}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def duration(seconds: float) -> str:
    """0.42 -> 0.4s, 75 -> 1m15s, 7,500 -> 2h05m, 200,000 -> 2d07h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s" if seconds >= 0.05 else "0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def milliseconds(seconds: float) -> float:
    """For a table: 0.0123456 -> 12.35, 1.2345 -> 1234."""
    return round(seconds * 1e3) if seconds >= 0.1 else round(seconds * 1e3, 2)


def thousands(value: float) -> str:
    """12345 -> 12.3k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def gib(size: float, decimals: int = 2) -> str:
    """Bytes as GiB: 1,610,612,736 -> 1.50 GiB."""
    return f"{size / GIB:,.{decimals}f} GiB"
