"""Prints lines, and formats numbers in them: 1 step, 2,000 steps; row 7, rows 7 to 9; 2h05m; 1.50 GiB."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

GIB = 2**30


def print_line(text: str, output: TextIO | None = None) -> None:
    """Prints `text` at once, to stdout by default. If the output fails, since its reader has gone (`| tee` after
    Ctrl-C) or its disk is full, the null device replaces it: the run neither dies nor hangs."""
    output = output or sys.stdout
    try:
        print(text, file=output, flush=True)
    except OSError:
        with suppress(OSError), Path(os.devnull).open("wb") as null_device:
            os.dup2(null_device.fileno(), output.fileno())


def pluralize(number: float, noun: str, format_spec: str = ",") -> str:
    """A number and its noun in singular or plural: `pluralize(2, "step")` is 2 steps."""
    text = format(number, format_spec)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def format_range(noun: str, numbers: range) -> str:
    """Consecutive numbers: `format_range("row", range(7, 10))` is rows 7 to 9."""
    first, last = numbers.start, numbers.stop - 1
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def did_you_mean(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """A question that suggests the closest of `choices`; empty if none is similar."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean `{prefix}{matches[0]}`?" if matches else ""


def format_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Numbers after their noun: `rank 3`, or `ranks 0, 3`."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def format_names(names: Iterable[str], limit: int = 3) -> str:
    """Distinct names, of which the first few are listed: a.txt, b.txt, c.txt and 4 others."""
    distinct = [*dict.fromkeys(names)]
    num_others = len(distinct) - limit
    return ", ".join(distinct[:limit]) + (f" and {pluralize(num_others, 'other')}" if num_others > 0 else "")


def format_duration(seconds: float) -> str:
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


def to_milliseconds(seconds: float) -> float:
    """Seconds as rounded milliseconds: 0.0123456 -> 12.35, 1.2345 -> 1234."""
    return round(seconds * 1e3) if seconds >= 0.1 else round(seconds * 1e3, 2)


def format_si(value: float) -> str:
    """12345 -> 12.3k."""
    for limit, unit, rounded_up in ((1e9, "G", 0.99995), (1e6, "M", 0.99995), (1e3, "k", 0.9995)):
        if value >= rounded_up * limit:  # it would be 1000.0 of the unit below, or 1000
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def format_gib(size: float, decimals: int = 2) -> str:
    """Bytes as GiB: 1,610,612,736 -> 1.50 GiB."""
    return f"{size / GIB:,.{decimals}f} GiB"
