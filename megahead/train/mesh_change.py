"""On which mesh a session trains, and on which the one before did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megahead.train.run_log import records_with
from megahead.wording import counted

MeshShape = dict[str, int]
"""`data` and `tensor` ranks, and how many ranks are `waiting`."""


@dataclass(frozen=True)
class MeshChange:
    """The mesh of a session; `before`: that of the session before it, if that is known."""

    now: MeshShape
    before: MeshShape | None = None

    @staticmethod
    def since(metrics: Path, now: MeshShape) -> MeshChange:
        """`metrics`: the log that earlier sessions wrote, if there were any."""
        if not metrics.exists():
            return MeshChange(now)
        with metrics.open("rb") as lines:
            sessions = [record["session"] for record in records_with(lines, "session")]
        return MeshChange(now, sessions[-1].get("mesh") if sessions else None)

    def facts(self) -> dict[str, MeshShape]:
        """For the log: the mesh, and what it was before if that was another."""
        changed = self.before is not None and self.before != self.now
        return {"mesh": self.now} | ({"mesh_before": self.before} if self.before and changed else {})

    def lines(self) -> list[tuple[str, str]]:
        """For the banner: a line if it changed."""
        before = self.facts().get("mesh_before")
        return [("mesh now", f"{described(self.now)}; {described(before)} before")] if before else []


def described(mesh: MeshShape) -> str:
    """For example: 1 tensor x 2 data ranks, 1 waits."""
    waiting = mesh["waiting"]
    rest = f", {waiting} {'waits' if waiting == 1 else 'wait'}" if waiting else ""
    return f"{mesh['tensor']} tensor x {counted(mesh['data'], 'data rank')}{rest}"
