"""A run on nodes that die, are cut off and come back: network namespaces, with torchrun's agents on them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megahead.checkpoints.reading import open_checkpoint
from megahead.report.read import events_of, read_runs
from megahead.train.faults import StopRequest
from megahead.train.log import RunLogger
from soak.agent import keep_time_by
from soak.hosts import Host, Wire, hosts
from support.agents import Node
from support.commands import config_file
from support.node_memories import give_memory, memory_of
from support.small_run import same_tensors

PORT = 29500
STEPS = {
    "training.steps": 8,
    "training.checkpoint_every": 2,
    "training.evaluate_every": 8,
    "optimizer.eps": 1e-4,  # else a weight without a gradient follows rounding
}


class Cluster:
    """Nodes, their agents, and the run that they train."""

    def __init__(self, there: list[Host], wire: Wire, folder: Path, config: str, pauses: tuple[int, ...]) -> None:
        self.hosts, self.wire, self.folder, self.config, self._pauses = there, wire, folder, config, pauses
        self.nodes: dict[int, Node] = {}
        self.agents: dict[int, BaseProcess] = {}

    def start(self, *numbers: int, options: tuple[str, ...] = (), **more: Any) -> None:
        for number in numbers:
            command = ["--config", self.config, "--set", "parallel.elastic=true", *options]
            meeting = f"{self.hosts[0].address}:{PORT}"
            node = Node(
                self.hosts[number], number, self.folder, meeting, command, self._pausing, len(self.hosts), **more
            )
            self.nodes[number], self.agents[number] = node, node.start()

    def kill(self, number: int) -> None:
        """With all that was in its memory."""
        self.hosts[number].kill()
        self.agents[number].join()
        shutil.rmtree(memory_of(self.folder, number))

    def tell_to_leave(self, number: int) -> None:
        """Returns when its rank, which pauses, knows of it: the agent says so before it passes the signal on."""
        os.kill(self.agents[number].pid or 0, signal.SIGTERM)
        self.until((self.folder / f"asked-{number}").exists)

    def copied(self, step: int) -> None:
        """Waits until a copy of that step is in the memory of all nodes."""
        self.until(
            lambda: all(
                any(memory_of(self.folder, number).glob(f"megahead-run-*/*/rank-*/step-{step:08d}-*"))
                for number in range(len(self.hosts))
            )
        )

    def paused(self, step: int) -> None:
        """Waits until the run stands still behind that step."""
        self.until(lambda: (self.folder / f"paused-{step}").exists())

    def until(self, happened: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def go_on(self, step: int) -> None:
        (self.folder / f"go-on-{step}").touch()

    def finished(self) -> None:
        """Waits until it is and all agents have ended, whatever the code of one that met the others too late."""
        self.until(lambda: (self.folder / "run/ending.json").exists() and '"finished"' in self.ending())
        assert None not in self.ended(*self.agents), self.said()

    def ending(self) -> str:
        return (self.folder / "run/ending.json").read_text()

    def data_ranks(self) -> int:
        """Of the last session."""
        return int(self._sessions()[-1]["mesh"]["data"])

    def ended(self, *numbers: int, seconds: float = 40) -> list[int | None]:
        """The agents' exit codes."""
        deadline = time.monotonic() + seconds
        for number in numbers:
            self.agents[number].join(max(0.0, deadline - time.monotonic()))
        return [self.agents[number].exitcode for number in numbers]

    def said(self) -> str:
        return "\n".join(f"node {number}:\n{node.said()}" for number, node in self.nodes.items())

    def meshes(self) -> list[str]:
        """The report's events about them, from when all had met."""
        texts = [event.text for event in events_of(read_runs([self.folder / "run"])[0])]
        meshes = [session["mesh"] for session in self._sessions()]
        first = [mesh["data"] * mesh["tensor"] + mesh["waiting"] for mesh in meshes].index(len(self.hosts))
        before = sum("mesh_before" in session for session in self._sessions()[: first + 1])
        return [text for text in texts if text.startswith("continued on")][before:]

    def equals(self, by_one: Path, by_two: Path) -> bool:
        """Whether its weights are those of an undisturbed run: its bits, if two data ranks had all steps."""
        if all(session["mesh"]["data"] == 2 for session in self._sessions()):
            return same_tensors(self.folder / "run", by_two)
        return largest_difference(self.folder / "run", by_one) < 1e-5

    def _sessions(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record["session"] for record in records if "session" in record]

    def _pausing(self, number: int) -> None:
        """In an agent, and so in its ranks: behind such a step they wait, until they may go on or are asked to stop."""
        give_memory(self.folder, number)
        keep_time_by(self.folder / f"ahead-{number}")
        note, ask = RunLogger.log_step, StopRequest._on_signal
        asked: list[int] = []

        def noted(logger: RunLogger, report: Any, state: Any, **kwargs: Any) -> None:
            note(logger, report, state, **kwargs)
            if os.environ["WORLD_SIZE"] == str(len(self.hosts)):
                (self.folder / "all-met").touch()
            while not (self.folder / "all-met").exists() and not asked:  # on a busy machine one came late
                time.sleep(0.02)
            if state.step in self._pauses:
                (self.folder / f"paused-{state.step}").touch()
                while not (self.folder / f"go-on-{state.step}").exists() and not asked:
                    time.sleep(0.02)

        def remembered(request: StopRequest, signal_number: int, frame: Any) -> None:
            asked.append(signal_number)
            ask(request, signal_number, frame)
            (self.folder / f"asked-{number}").touch()

        RunLogger.log_step = noted  # type: ignore[method-assign]
        StopRequest._on_signal = remembered  # type: ignore[method-assign]


@contextmanager
def cluster(
    folder: Path, count: int, pauses: tuple[int, ...] = (), changes: Mapping[str, Any] | None = None
) -> Iterator[Cluster]:
    with hosts(count) as (there, wire):
        yield Cluster(there, wire, folder, config_file(folder, {**STEPS, **(changes or {})}), pauses)


def largest_difference(mine: Path, theirs: Path) -> float:
    """Between the weights of two runs' newest checkpoints."""
    ours, others = open_checkpoint(mine), open_checkpoint(theirs)
    names = [name for name in ours.names() if name.startswith("weight/")]
    assert names
    assert ours.step == others.step
    return max(float((ours.read(name) - others.read(name)).abs().max()) for name in names)
