"""A soak from beginning to end, in as many sittings as it takes: a small decoder that learns the bytes of docs/."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megahead.data.writer import IndexedDatasetWriter
from megahead.files import write_atomically
from soak.faults import KINDS, Progress, Script
from soak.nodes import ROOT, mounted
from soak.outcome import Stretch, account, compare, finish, stretches, train_twin, write_page
from soak.sitting import Journal, SoakError, cluster, sit

ENDLESS = 100_000_000
"""Steps, until it is decided when to end: the learning rate does not depend on them."""

BATCH = 12
"""Rows: for one to four ranks."""


def write_course(folder: Path, text: Path | None, ids: int) -> Path:
    """The run's config, made when the soak begins. `text`: a dataset of `ids` ids instead of docs/."""
    config = folder / "soak.yaml"
    if not config.exists():
        write_atomically(config, yaml.safe_dump(_settings(folder, text or _docs(folder / "docs"), ids)))
    return config


def _settings(folder: Path, text: Path, ids: int) -> dict[str, Any]:
    folder = folder.absolute()
    return {
        "name": "soak",
        "output_dir": str(folder / "disk/run"),
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": ids, "vocab_multiple": 64},
        "data": {"train": str(text.absolute()), "sequence_length": 128},
        "batch": {"global_size": BATCH, "micro_size": 1},
        "objective": {"name": "headless"},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "constant"},
        "training": {
            "steps": ENDLESS,
            "log_seconds": 0,
            "checkpoint_every": 100,
            "keep_checkpoints": 4,
            "replicate_every": 10,
        },
        "faults": {"replicas_every": 1},  # a flipped last bit may be rounded away, but not its trace
        "engine": {"device": "cpu", "timeout_seconds": 40, "deepspeed": {"zero_optimization": {"stage": 0}}},
    }


def _docs(prefix: Path) -> Path:
    """A page a document, a byte a token; 0 ends it."""
    with IndexedDatasetWriter(prefix, vocab_size=256) as writer:
        for page in sorted((ROOT / "docs").glob("*.md")):
            writer.add_document([*page.read_bytes(), 0])
    return prefix


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
    told = write_page(folder, accounts, found, events, asdict(settings))
    if not (found.same_bits and found.same_rows):
        print(told, flush=True)
        raise SoakError(f"the run must end as its twin, but does not: {json.dumps(asdict(found))}.")
    return told
