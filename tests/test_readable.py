"""Durations, counts and sizes, as they are printed."""

from __future__ import annotations

import pytest

from megahead.wording import duration, gib, plural, thousands


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.42, "0.4s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (75, "1m15s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (200_000, "2d07h"),
        (float("inf"), "?"),
    ],
)
def test_a_duration_is_short_at_any_length(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_and_sizes() -> None:
    assert [thousands(n) for n in (999, 12_345, 2_000_000, 3e9)] == ["999", "12.3k", "2.0M", "3.0G"]
    assert gib(3 * 2**29) == "1.50 GiB"
    assert [plural(n, "step") for n in (0, 1, 1_000)] == ["0 steps", "1 step", "1,000 steps"]
