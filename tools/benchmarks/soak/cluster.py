"""The nodes of a soak, looked after as by a cluster that starts again what ended, and waits that have an end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hosts import hosts, may_make_hosts
from benchmarks.soak.disk import mounted
from benchmarks.soak.faults import Stage
from benchmarks.soak.nodes import PORT, MeetingPlace, Node, node_script
from benchmarks.soak.progress import Progress
from megahead.errors import UserError

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
