"""Lets the script's faults happen to a run, one event after the other, and sees that it recovers from each."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from benchmarks.soak.cluster import Cluster, SoakError
from benchmarks.soak.faults import KINDS, Kind
from benchmarks.soak.journal import Journal, Sitting
from benchmarks.soak.progress import Progress
from benchmarks.soak.script import Event, Fault, Script

RECOVERY_SECONDS = 600.0
"""By when a run must have recovered, on a machine however busy."""

PATIENCE_SECONDS = 60.0
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
        if done is None and time.monotonic() < self._began + fault.after + PATIENCE_SECONDS:
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
