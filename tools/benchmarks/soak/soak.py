"""A soak from beginning to end, in as many sittings as it takes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.soak import page
from benchmarks.soak.accounts import account
from benchmarks.soak.cluster import SoakError, cluster
from benchmarks.soak.course import write_course
from benchmarks.soak.disk import mounted
from benchmarks.soak.ending import Stretch, compare, finish, stretches, train_twin
from benchmarks.soak.faults import KINDS
from benchmarks.soak.journal import Journal
from benchmarks.soak.progress import Progress
from benchmarks.soak.script import Script
from benchmarks.soak.sitting import sit
from megahead.files import write_atomically

MORE_STEPS = 20
"""Beyond the last that faults could reach."""


@dataclass(frozen=True)
class Settings:
    """By which a soak is the same in all its sittings."""

    seed: int
    hosts: int
    every: float
    ranks: str
    """fixed: training waits for lost nodes; any: it goes on with those that are there."""

    pace: float
    kinds: list[str]

    def nodes(self) -> str:
        """Least and most that train together."""
        return f"{self.hosts if self.ranks == 'fixed' else 1}:{self.hosts}"

    def script(self) -> Script:
        kinds = {name: KINDS[name].lasts for name in self.kinds}
        alone = frozenset(name for name in self.kinds if KINDS[name].alone)
        return Script(self.seed, kinds, alone, self.hosts, self.every)


def soak(folder: Path, settings: Settings, seconds: float, text: tuple[Path, int] | None) -> None:
    """Goes on where it was stopped; tells and returns when all is done, or someone wants to stop (Ctrl-C, SIGTERM).
    SoakError where the run, or its end, is not as it must be."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    journal, stopping = Journal(folder), _asked_to_stop()
    with journal.held(asdict(settings)):
        config = write_course(folder, *(text or (None, 256)))
        stage = partial(cluster, folder, count=settings.hosts, pace=settings.pace, stopping=stopping)
        command, fixed = [str(config)], f"{settings.hosts}:{settings.hosts}"
        if journal.seconds() < seconds and not _last_step(folder).exists():
            with stage(command, nodes=settings.nodes()) as there:
                sit(there, settings.script(), journal, seconds)
            journal.save()
            if stopping():
                return print("stopped; the same command goes on from here", flush=True)
        steps = _decide_last_step(folder)
        with stage([*command, "--set", f"training.steps={steps}"], nodes=fixed) as there:
            done = finish(there, folder / "disk/run")
        done = done and train_twin(config, folder / "twin", folder / "twin.log", _course(folder), stopping)
        print(_told(folder, journal, settings) if done else "stopped; the same command goes on from here", flush=True)


def _asked_to_stop() -> Callable[[], bool]:
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    return lambda: bool(asked)


def _last_step(folder: Path) -> Path:
    return folder / "last-step"


def _decide_last_step(folder: Path) -> int:
    """Once and for all: beyond where the run is."""
    file = _last_step(folder)
    if not file.exists():
        with mounted(folder) as disk:
            reached = Progress(disk.place / "run/metrics.jsonl").step
        write_atomically(file, str(reached + MORE_STEPS))
    return int(file.read_text(encoding="utf-8"))


def _course(folder: Path) -> list[Stretch]:
    with mounted(folder) as disk:
        return stretches(disk.place / "run/metrics.jsonl")


def _told(folder: Path, journal: Journal, settings: Settings) -> str:
    events = journal.events()
    with mounted(folder) as disk:
        run = disk.place / "run"
        found, accounts = compare(run, folder / "twin"), account(run, journal.sittings, events)
    told = page.write(folder, accounts, found, events, asdict(settings))
    if not (found.same_bits and found.same_rows):
        print(told, flush=True)
        raise SoakError(f"the run must end as its twin, but does not: {json.dumps(asdict(found))}.")
    return told
