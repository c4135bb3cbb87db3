"""How each kind of fault is made, and what ends it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from benchmarks.hosts import Wire
from benchmarks.soak.disk import Disk, empty, fill
from benchmarks.soak.nodes import MeetingPlace, Node
from benchmarks.soak.progress import Progress
from benchmarks.soak.script import Fault

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
