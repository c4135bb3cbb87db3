"""The soak's script: decided by its seed alone."""

from __future__ import annotations

import statistics

from benchmarks.soak.faults import KINDS
from benchmarks.soak.script import SECOND_WITHIN, Script
from benchmarks.soak.soak import Settings


def script(seed: int = 0, kinds: list[str] | None = None) -> Script:
    return Settings(seed, 3, 60.0, "any", 0.0, kinds or sorted(KINDS)).script()


def test_an_event_is_the_same_whenever_it_is_asked_for() -> None:
    events = [script().event(number) for number in range(40)]
    assert script().event(33) == events[33]
    assert events != [script(seed=1).event(number) for number in range(40)]


def test_each_kind_comes_first_once_a_round() -> None:
    for start in (0, len(KINDS), 5 * len(KINDS)):
        first = [script().event(start + place).faults[0].kind for place in range(len(KINDS))]
        assert sorted(first) == sorted(KINDS)


def test_events_come_as_often_as_told_and_some_have_two_faults() -> None:
    events = [script().event(number) for number in range(600)]
    assert 55 < statistics.fmean(event.pause for event in events) < 65
    assert 0.1 < statistics.fmean(len(event.faults) == 2 for event in events) < 0.3
    for fault in (fault for event in events for fault in event.faults):
        least, most = KINDS[fault.kind].lasts
        assert least <= fault.lasts <= most
        assert 0 <= fault.after <= SECOND_WITHIN
        assert fault.node in range(3)


def test_a_flipped_bit_comes_alone() -> None:
    """Another fault could undo it before replicas are compared."""
    events = [script(kinds=["bit flipped in a weight", "rank killed"]).event(number) for number in range(200)]
    flips = [event for event in events if any(fault.kind == "bit flipped in a weight" for fault in event.faults)]
    assert len(flips) == 100
    assert all(len(event.faults) == 1 for event in flips)
