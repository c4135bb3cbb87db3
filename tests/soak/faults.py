"""The soak's script of faults, which a seed decides, and how each kind of fault is made and ended.

*Event*: a fault, or two that come one soon after the other. *Sitting*: the time in which one process lets events
happen; a soak may take several. *Whole*: of a cluster, all its nodes train.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from soak.hosts import Wire
from soak.nodes import Disk, MeetingPlace, Node, empty, fill

USUAL = 100
"""Steps by which it is told how long one takes."""


class Progress:
    """Of the run with that log, as of the last `read`."""

    def __init__(self, metrics: Path) -> None:
        self._metrics, self._place = metrics, 0
        self.step = self.sessions = self.ranks = self.steps_since_session = 0
        self.odd_replicas = 0
        """That were found, and after which another session has begun."""
        self.lines = 0
        """Steps that were logged, those done again included."""
        self._odd = False
        self._seconds: deque[float] = deque(maxlen=USUAL)
        self.read()

    def read(self) -> None:
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                self._note(json.loads(line))

    def usual_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def _note(self, record: dict[str, object]) -> None:
        if isinstance(session := record.get("session"), dict):
            self.sessions, self.steps_since_session = self.sessions + 1, 0
            self.step, self.ranks = int(session["continues"]), int(session["mesh"]["data"])
            self.odd_replicas, self._odd = self.odd_replicas + self._odd, False
        self._odd |= "replica" in record
        if "loss" in record:
            self.step, self.lines = int(str(record["step"])), self.lines + 1
            self.steps_since_session += 1
            self._seconds.append(float(str(record["step_seconds"])))


SECOND = 0.2
"""Share of events at which another fault comes before the run has recovered."""

SECOND_WITHIN = 12.0
"""Seconds."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    node: int

    after: float
    """Seconds since its event began."""

    lasts: float
    """Seconds, of what passes by itself."""

    chance: int
    """By which all else about it is decided."""


@dataclass(frozen=True)
class Event:
    """A fault, or two one soon after the other."""

    number: int

    pause: float
    """Seconds from the beginning of the event before."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Script:
    """Rounds of events, in which each kind comes first once."""

    seed: int
    kinds: Mapping[str, tuple[float, float]]
    """How many seconds each may last, at least and at most."""

    alone: frozenset[str]
    """Kinds that come alone: another fault would hide whether they are found."""

    nodes: int

    every: float
    """Seconds from event to event, on average."""

    def event(self, number: int) -> Event:
        """The same whenever it is asked for."""
        in_round, place = divmod(number, len(self.kinds))
        kind = Random(f"{self.seed} round {in_round}").sample(sorted(self.kinds), len(self.kinds))[place]
        chance = Random(f"{self.seed} event {number}")
        faults = [self._fault(kind, 0.0, chance)]
        others = sorted(self.kinds.keys() - self.alone - {kind})
        if others and kind not in self.alone and chance.random() < SECOND:
            faults.append(self._fault(chance.choice(others), chance.uniform(0, SECOND_WITHIN), chance))
        return Event(number, self.every * chance.uniform(0.5, 1.5), tuple(faults))

    def _fault(self, kind: str, after: float, chance: Random) -> Fault:
        node, lasts = chance.randrange(self.nodes), chance.uniform(*self.kinds[kind])
        return Fault(kind, node, round(after, 2), round(lasts, 2), chance.getrandbits(31))


Seconds = tuple[float, float]
LATE_SECONDS, LOST_SHARE = 0.05, 0.01
"""A slow network's: of each way, of all frames."""


@dataclass(frozen=True)
class Stage:
    """Where it happens."""

    nodes: list[Node]
    meeting: MeetingPlace
    wire: Wire
    disk: Disk
    run: Path


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    lasts: Seconds
    """At least and at most, of what passes by itself."""

    begin: Callable[[Stage, Fault], str | None]
    """What was done, or None where there was nothing to do it to."""

    end: Callable[[Stage, Fault], None] = lambda stage, fault: None

    sign: Callable[[Progress], int] | None = None
    """What grows once the run has taken notice; None where it need not."""

    settles: float = 8.0
    """Seconds for which the run must then go on, where it may take notice later."""

    alone: bool = False


def _kill_rank(stage: Stage, fault: Fault) -> str | None:
    return _signal_rank(stage, fault, signal.SIGKILL)


def _signal_rank(stage: Stage, fault: Fault, number: int) -> str | None:
    rank = stage.nodes[fault.node].rank()
    if rank is None:
        return None
    with suppress(psutil.NoSuchProcess):
        rank.send_signal(number)
    return f"process {rank.pid}"


def _kill_node(stage: Stage, fault: Fault) -> str | None:
    node = stage.nodes[fault.node]
    node.away = True
    node.kill()
    return f"away for {fault.lasts:g} s"


def _switch_off(stage: Stage, fault: Fault) -> str | None:
    """Others hear nothing of it, not even that connections are closed."""
    stage.wire.cut.add(fault.node)
    return _kill_node(stage, fault)


def _ask_to_leave(stage: Stage, fault: Fault) -> str | None:
    node = stage.nodes[fault.node]
    node.away = True
    node.ask_to_leave()
    return f"away for {fault.lasts:g} s"


def _come_back(stage: Stage, fault: Fault) -> None:
    stage.wire.cut.discard(fault.node)
    stage.nodes[fault.node].away = False


def _stop_rank(stage: Stage, fault: Fault) -> str | None:
    done = _signal_rank(stage, fault, signal.SIGSTOP)
    return done and f"{done} for {fault.lasts:g} s"


def _continue(stage: Stage, fault: Fault) -> None:
    stage.nodes[fault.node].send(signal.SIGCONT)


def _freeze(stage: Stage, fault: Fault) -> str | None:
    stage.nodes[fault.node].send(signal.SIGSTOP)
    return f"for {fault.lasts:g} s"


def _cut(stage: Stage, fault: Fault) -> str | None:
    stage.wire.cut.add(fault.node)
    return f"for {fault.lasts:g} s"


def _heal(stage: Stage, fault: Fault) -> None:
    stage.wire.cut.discard(fault.node)


def _slow_down(stage: Stage, fault: Fault) -> str | None:
    stage.wire.delay, stage.wire.loss = LATE_SECONDS, LOST_SHARE
    return f"for {fault.lasts:g} s"


def _speed_up(stage: Stage, fault: Fault) -> None:
    stage.wire.delay = stage.wire.loss = 0.0


def _jump(stage: Stage, fault: Fault) -> str | None:
    hours = Random(fault.chance).choice([-24, -1, -0.1, 0.1, 1, 24])
    (stage.nodes[fault.node].folder / "ahead").write_text(str(hours))
    return f"{hours:+g} h for {fault.lasts:g} s"


def _jump_back(stage: Stage, fault: Fault) -> None:
    (stage.nodes[fault.node].folder / "ahead").unlink(missing_ok=True)


def _fill_disk(stage: Stage, fault: Fault) -> str | None:
    stage.disk.fill()
    return f"for {fault.lasts:g} s"


def _empty_disk(stage: Stage, fault: Fault) -> None:
    stage.disk.empty()


def _fill_memory(stage: Stage, fault: Fault) -> str | None:
    memory = stage.nodes[fault.node].memory()
    if memory is None:
        return None
    fill(memory)
    return f"for {fault.lasts:g} s"


def _empty_memory(stage: Stage, fault: Fault) -> None:
    memory = stage.nodes[fault.node].memory()
    if memory is not None:
        empty(memory)


def _damage_checkpoint(stage: Stage, fault: Fault) -> str | None:
    """The newest, if there is another; and a rank is killed, so that it is asked for."""
    folders = sorted((stage.run / "checkpoints").glob("step-*"))
    done = damage(sorted(folders[-1].iterdir()), fault) if len(folders) > 1 else None
    return done and _kill_rank(stage, fault) and done


def _damage_copy(stage: Stage, fault: Fault) -> str | None:
    """One in a node's memory; and a rank is killed, so that it is asked for."""
    memory = stage.nodes[fault.node].memory()
    files = [] if memory is None else sorted(memory.glob("megahead-*/*/rank-*/step-*/*"))
    done = damage(files, fault)
    return done and _kill_rank(stage, fault) and done


def damage(files: list[Path], fault: Fault) -> str | None:
    """One of them, in some way; says which, and how."""
    if not files:
        return None
    chance = Random(fault.chance)
    file, way = (
        chance.choice(files),
        chance.choice(["a bit flipped", "cut short", "removed", "removed with its folder"]),
    )
    with suppress(FileNotFoundError):  # it has just been replaced
        if way == "removed with its folder":
            shutil.rmtree(file.parent)
        elif way == "removed":
            file.unlink()
        else:
            _spoil(file, chance, cut=way == "cut short")
    return f"{way}: {'/'.join(file.parts[-2:])}"


def _spoil(file: Path, chance: Random, cut: bool) -> None:
    size = file.stat().st_size
    place = chance.randrange(max(size, 1))
    if cut:
        os.truncate(file, place)
    elif size:
        with file.open("r+b") as opened:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _flip(stage: Stage, fault: Fault) -> str | None:
    (stage.nodes[fault.node].folder / "flip").write_text(str(fault.chance))
    return f"number {fault.chance}"


def _lose_meeting(stage: Stage, fault: Fault) -> str | None:
    """All agents end, and are started again with it."""
    stage.meeting.away = True
    stage.meeting.kill()
    return f"away for {fault.lasts:g} s"


def _meet_again(stage: Stage, fault: Fault) -> None:
    stage.meeting.away = False


def _sessions(progress: Progress) -> int:
    return progress.sessions


def _odd_replicas(progress: Progress) -> int:
    return progress.odd_replicas


AT_ONCE, AWAY = (0.0, 0.0), (0.0, 60.0)
KINDS = {
    "rank killed": Kind(AT_ONCE, _kill_rank, sign=_sessions),
    "rank stopped": Kind((2, 70), _stop_rank, _continue),
    "node killed": Kind(AWAY, _kill_node, _come_back, sign=_sessions),
    "node switched off": Kind(AWAY, _switch_off, _come_back, sign=_sessions),
    "node asked to leave": Kind(AWAY, _ask_to_leave, _come_back, sign=_sessions),
    "node frozen": Kind((2, 30), _freeze, _continue),
    "network cut": Kind((2, 40), _cut, _heal),
    "network slow and lossy": Kind((10, 40), _slow_down, _speed_up),
    "clock jumps": Kind((5, 40), _jump, _jump_back),
    "disk full": Kind((5, 40), _fill_disk, _empty_disk),
    "memory for copies full": Kind((5, 40), _fill_memory, _empty_memory),
    "checkpoint damaged": Kind(AT_ONCE, _damage_checkpoint, sign=_sessions),
    "copy in memory damaged": Kind(AT_ONCE, _damage_copy, sign=_sessions),
    "bit flipped in a weight": Kind(AT_ONCE, _flip, sign=_odd_replicas, alone=True),
    "meeting place lost": Kind((0, 5), _lose_meeting, _meet_again, sign=_sessions),
}
