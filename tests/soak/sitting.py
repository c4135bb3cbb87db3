"""One sitting of a soak: faults happen to the nodes, one event after the other, and the run recovers from each.

The journal keeps what was done, so that another sitting goes on from there; the cluster starts again what ended.
"""

from __future__ import annotations

import fcntl
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megahead.errors import FieldError, UserError
from megahead.files import write_atomically
from soak.faults import KINDS, Event, Fault, Kind, Progress, Script, Stage
from soak.hosts import hosts, may_make_hosts
from soak.nodes import PORT, MeetingPlace, Node, mounted, node_script


@dataclass
class Sitting:
    """Steps and time in which faults came, from when all nodes trained."""

    began: str
    from_step: int
    to_step: int
    seconds: float


class Journal:
    """In `folder`. Every line of events.jsonl has its time; a fault also its kind, its node and what was done."""

    def __init__(self, folder: Path) -> None:
        self._events, self._sittings = folder / "events.jsonl", folder / "sittings.json"
        self._folder = folder
        listed = json.loads(self._sittings.read_text(encoding="utf-8")) if self._sittings.exists() else []
        self.sittings = [Sitting(**sitting) for sitting in listed]

    @contextmanager
    def held(self, settings: dict[str, Any]) -> Iterator[None]:
        """By this process alone; FieldError where the soak was begun with other settings."""
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"`--folder` must be used by one soak at a time, but {self._folder} is in use."
                ) from None
            kept = self._folder / "settings.json"
            before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else settings
            for name, value in settings.items():
                if before[name] != value:
                    raise FieldError(f"--{name}", f"be {before[name]} as this soak began", got=value)
            write_atomically(kept, json.dumps(settings) + "\n")
            yield

    def note(self, **facts: Any) -> None:
        line = json.dumps({"time": datetime.now().isoformat(timespec="milliseconds"), **facts})
        with self._events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def events(self) -> list[dict[str, Any]]:
        """All lines, but for one that was cut short."""
        if not self._events.exists():
            return []
        lines = self._events.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def next_event(self) -> int:
        """An event that a sitting was stopped in does not come again."""
        return 1 + max((line["event"] for line in self.events() if "event" in line), default=-1)

    def seconds(self) -> float:
        """Of all sittings."""
        return sum(sitting.seconds for sitting in self.sittings)

    def save(self) -> None:
        write_atomically(self._sittings, json.dumps([asdict(sitting) for sitting in self.sittings], indent=1) + "\n")


LEAVE_SECONDS = 90.0
"""For ranks to save once they are asked to stop."""

_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 2.0


class SoakError(UserError):
    """The run did not do what it must."""


@dataclass
class Cluster:
    """Its stage, and how far the run on it is."""

    stage: Stage
    progress: Progress
    stopping: Callable[[], bool]
    """Whether someone wants this process to stop."""

    _sessions: int = 0
    """That there were before the nodes were started."""

    _ended: dict[int, float] = field(default_factory=dict)
    _heard: float = field(default_factory=time.monotonic)

    def until(self, happened: Callable[[], bool], seconds: float, what: str, quiet: float | None = None) -> bool:
        """Whether it did before someone wants to stop; SoakError once `seconds` have passed, or `quiet` seconds without
        a step."""
        deadline, self._heard = time.monotonic() + seconds, time.monotonic()
        while not happened():
            if self.stopping():
                return False
            if time.monotonic() > deadline or time.monotonic() > self._heard + (quiet or seconds):
                raise SoakError(f"{what} must happen within {quiet or seconds:g} s, but does not.")
            time.sleep(_POLL_SECONDS)
            self.look_after()
        return True

    def look_after(self) -> None:
        """Starts again what has ended, two seconds later; reads the log."""
        for number, machine in enumerate((self.stage.meeting, *self.stage.nodes)):
            if machine.runs():
                self._ended.pop(number, None)
            elif (
                not machine.away
                and time.monotonic() > self._ended.setdefault(number, time.monotonic()) + _AGAIN_SECONDS
            ):
                machine.begin()
        lines = self.progress.lines
        self.progress.read()
        if self.progress.lines > lines:
            self._heard = time.monotonic()

    def start(self) -> None:
        self._sessions = self.progress.sessions
        for machine in (self.stage.meeting, *self.stage.nodes):
            machine.away = False
            machine.begin()

    def whole(self) -> bool:
        """Whether all nodes train, and have."""
        nodes, progress = self.stage.nodes, self.progress
        there = all(node.runs() and not node.away for node in nodes)
        begun = progress.sessions > self._sessions and progress.steps_since_session >= 2
        return there and begun and progress.ranks == len(nodes)

    def stop(self) -> None:
        """All ranks save and end; what has not after a while is killed."""
        for node in self.stage.nodes:
            node.away = True
            node.send(signal.SIGCONT)
            node.ask_to_leave()
        deadline = time.monotonic() + LEAVE_SECONDS
        while any(node.runs() for node in self.stage.nodes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for machine in (*self.stage.nodes, self.stage.meeting):
            machine.kill()
        self.progress.read()


@contextmanager
def cluster(
    folder: Path, command: list[str], count: int, nodes: str, pace: float, stopping: Callable[[], bool]
) -> Iterator[Cluster]:
    """`count` nodes that are not started yet, of which `nodes` (least:most) train together; the run is in
    `folder`/disk/run. What faults of a sitting that was killed have left is put right."""
    if not may_make_hosts():
        raise UserError("a soak needs root, ip and /dev/net/tun for hosts of their own, but one of them is missing.")
    script = ["bash", str(node_script(folder))]
    with mounted(folder) as disk, hosts(count + 1) as (there, wire):
        words = [*script, f"{there[-1].address}:{PORT}", *command]
        trained = [
            Node(host, folder / f"node-{number}.log", number, folder / f"node-{number}", words, nodes, pace)
            for number, host in enumerate(there[:-1])
        ]
        meeting, run = MeetingPlace(there[-1], folder / "meeting.log"), disk.place / "run"
        found = Cluster(Stage(trained, meeting, wire, disk, run), Progress(run / "metrics.jsonl"), stopping)
        disk.empty()
        for node in trained:
            node.put_right()
        try:
            yield found
        finally:
            for machine in (*trained, meeting):
                machine.kill()
            disk.empty()


RECOVERY_SECONDS = 600.0
"""By when a run must have recovered, on a machine however busy."""

WAIT_SECONDS = 60.0
"""For which a fault waits for what it can happen to: a rank to kill, a copy to damage."""


def sit(cluster: Cluster, script: Script, journal: Journal, seconds: float) -> None:
    """Until all sittings together have taken that long, or someone wants to stop. Then all have saved."""
    cluster.start()
    if not cluster.until(cluster.whole, RECOVERY_SECONDS, "the first steps of all nodes"):
        return cluster.stop()
    clock = _Clock(cluster, journal)
    while clock.goes_on(seconds):
        began, event = time.monotonic(), script.event(journal.next_event())
        if not Happening(cluster, journal, event, clock.tick).over():
            break
        clock.wait_until(began + script.event(event.number + 1).pause, seconds)
    clock.tick()
    return cluster.stop()


class _Clock:
    """Writes down how long the sitting has been, and how far it came."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self._cluster, self._journal, self._progress = cluster, journal, cluster.progress
        step = cluster.progress.step
        self._sitting = Sitting(datetime.now().isoformat(timespec="seconds"), step, step, 0.0)
        self._began = self._saved = time.monotonic()
        journal.sittings.append(self._sitting)

    def goes_on(self, seconds: float) -> bool:
        self.tick()
        return self._journal.seconds() < seconds and not self._cluster.stopping()

    def wait_until(self, then: float, seconds: float) -> None:
        """On the monotonic clock, or until it does not go on."""
        self._cluster.until(
            lambda: time.monotonic() > then or not self.goes_on(seconds),
            max(0.0, then - time.monotonic()) + RECOVERY_SECONDS,
            "steps",
        )

    def tick(self) -> None:
        now = time.monotonic()
        self._sitting.seconds, self._sitting.to_step = round(now - self._began, 3), self._progress.step
        if now > self._saved + 5:
            self._journal.save()
            self._saved = now


class Happening:
    """One event: its faults, and how the run recovers."""

    def __init__(self, cluster: Cluster, journal: Journal, event: Event, tick: Callable[[], None]) -> None:
        self._cluster, self._journal, self._event, self._tick = cluster, journal, event, tick
        self._progress = cluster.progress
        self._began, self._to_begin = time.monotonic(), list(event.faults)
        self._to_end: list[tuple[float, Fault]] = []
        self._signs: list[tuple[Callable[[Progress], int], int]] = []
        self._settles, self._quiet_at, self._quiet_step = 0.0, self._began, self._progress.step
        self._before = (self._progress.step, self._progress.lines, self._progress.sessions)
        self._usual = self._progress.usual_seconds()

    def over(self) -> bool:
        """Waits until it is; False if someone wants to stop before."""
        what = f"recovery from event {self._event.number} ({', '.join(fault.kind for fault in self._event.faults)})"
        try:
            recovered = self._cluster.until(self._recovered, RECOVERY_SECONDS, what)
        except SoakError:
            self._journal.note(event=self._event.number, failed=what)
            raise
        self._finish_faults()
        if recovered:
            self._journal.note(event=self._event.number, **self._outcome())
        return recovered

    def _recovered(self) -> bool:
        self._tick()
        now = time.monotonic()
        while self._to_begin and now >= self._began + self._to_begin[0].after:
            if not self._begin(self._to_begin[0]):
                break
            self._to_begin.pop(0)
        for end, fault in [due for due in self._to_end if now >= due[0]]:
            KINDS[fault.kind].end(self._cluster.stage, fault)
            self._to_end.remove((end, fault))
            self._quiet_at, self._quiet_step = now, self._progress.step
        if self._to_begin or self._to_end:
            return False
        noticed = all(sign(self._progress) > before for sign, before in self._signs)
        further = self._progress.step > max(self._before[0], self._quiet_step + 1)
        return noticed and further and self._cluster.whole() and now >= self._quiet_at + self._settles

    def _begin(self, fault: Fault) -> bool:
        """Whether it has begun, or waited in vain for something that it could happen to."""
        kind: Kind = KINDS[fault.kind]
        before = None if kind.sign is None else (kind.sign, kind.sign(self._progress))
        done = kind.begin(self._cluster.stage, fault)
        if done is None and time.monotonic() < self._began + fault.after + WAIT_SECONDS:
            return False
        self._journal.note(event=self._event.number, kind=fault.kind, node=fault.node, done=done)
        if done is None:
            return True
        self._quiet_at, self._quiet_step = time.monotonic(), self._progress.step
        self._to_end.append((self._quiet_at + fault.lasts, fault))
        if before is None:
            self._settles = max(self._settles, kind.settles)
        else:
            self._signs.append(before)
        return True

    def _finish_faults(self) -> None:
        """Of an event that was interrupted."""
        for _, fault in self._to_end:
            KINDS[fault.kind].end(self._cluster.stage, fault)

    def _outcome(self) -> dict[str, float | int]:
        """`cost`: seconds that went by beyond those in which as many steps usually are taken; `again`: steps."""
        step, lines, sessions = self._before
        seconds, progress = time.monotonic() - self._began, self._progress
        gained = progress.step - step
        return {
            "recovered": round(seconds, 2),
            "cost": round(max(0.0, seconds - gained * self._usual), 2),
            "again": progress.lines - lines - gained,
            "sessions": progress.sessions - sessions,
            "step": progress.step,
        }
