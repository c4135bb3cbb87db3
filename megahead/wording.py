"""Numbers in sentences that people read: 1 step, 2,000 steps; row 7, rows 7 to 9."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: float, thing: str, form: str = ",") -> str:
    """`number` as `form` writes it, and the thing there is one or several of: `counted(1, "data rank")`."""
    shown = format(number, form)
    return f"{shown} {thing}" if shown == "1" else f"{shown} {thing}s"


def span(thing: str, numbers: range) -> str:
    """Which consecutive ones: `span("row", range(7, 10))` is rows 7 to 9."""
    first, last = numbers.start, numbers.stop - 1
    return f"{thing} {first:,}" if first == last else f"{thing}s {first:,} to {last:,}"


def listed(thing: str, numbers: Sequence[int]) -> str:
    """Which ones, by their numbers: rank 3, ranks 0, 3."""
    return f"{thing}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
