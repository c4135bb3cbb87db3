"""Scenarios that mostly wait, in processes beside each other: together they take little longer than the longest."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.forked import FORK

Scenario = Callable[[Path], None]
"""Raises if something is not as it must be; the folder is its own."""


def failures_of(scenarios: Mapping[str, Scenario], folder: Path, at_once: int, seconds: float) -> dict[str, str]:
    """By the scenario's name: what those raised that did, or that they took more than `seconds`."""
    waiting, running, places = list(scenarios), dict[str, tuple[BaseProcess, float]](), dict[str, Path]()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            places[name] = folder / name
            places[name].mkdir()
            process = FORK.Process(target=_play, args=(scenarios[name], places[name]))
            process.start()
            running[name] = process, time.monotonic() + seconds
        for name, (process, deadline) in list(running.items()):
            if process.is_alive() and time.monotonic() < deadline:
                continue
            process.kill()
            process.join()
            del running[name]
        time.sleep(0.02)
    endings = {name: _ending(place) for name, place in places.items()}
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
