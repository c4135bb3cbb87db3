"""Scenarios that mostly wait, in processes beside each other: together they take little longer than the longest."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from support.forked import FORK

Scenario = Callable[[Path], None]
"""Raises if something is not as it must be; the folder is its own."""


def failures_of(scenarios: Mapping[str, Scenario], folder: Path, seconds: float) -> dict[str, str]:
    """By the scenario's name: what those raised that did, or that they took too long."""
    places = [folder / name for name in scenarios]
    processes = [FORK.Process(target=_play, args=pair) for pair in zip(scenarios.values(), places, strict=True)]
    deadline = time.monotonic() + seconds
    for place, process in zip(places, processes, strict=True):
        place.mkdir()
        process.start()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    endings = {place.name: _ending(place) for place in places}
    return {name: ending for name, ending in endings.items() if ending}


def _play(scenario: Scenario, place: Path) -> None:
    ending = ""
    try:
        scenario(place)
    except BaseException:
        ending = traceback.format_exc()
    place.with_suffix(".ending").write_text(ending)
    os._exit(0)


def _ending(place: Path) -> str:
    file = place.with_suffix(".ending")
    return file.read_text() if file.exists() else "it took too long"
