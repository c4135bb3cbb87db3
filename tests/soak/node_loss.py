"""Kills one of two nodes again and again, and times how long the run stands still: until the next applied step.

PYTHONPATH=.:tests python tests/soak/node_loss.py --kills 20 --folder /tmp/node-loss

The demo's model on made-up text. Both nodes are agents of launch/elastic.sh on this machine, with a rank each, which
meet at a store in this process. A node is killed with all its processes, either of them by chance, at a random moment;
when the other has gone on alone it is started again, and the next kill comes once both train. Times are those at which
lines of metrics.jsonl appear, so they include all of torchrun's waiting, imports, the checkpoint, and a whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
from torch import distributed

from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import UserError, run_command
from megahead.report.tables import to_json

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0


def measure(folder: Path, kills: int, seed: int) -> list[dict[str, float | int]]:
    """Prints and returns, for each kill, the victim and the seconds until each stage of going on."""
    times: list[dict[str, float | int]] = []
    moments = random.Random(seed)
    with _cluster(folder) as nodes:
        log = _Log(folder / "run/metrics.jsonl")
        for _ in range(kills):
            log.until(lambda: log.data_ranks == 2 and log.steps_since_session >= 3)
            time.sleep(moments.uniform(0, 5))
            victim = moments.randrange(2)
            times.append({"victim": victim, **_killed(nodes[victim], log)})
            print(json.dumps(times[-1]), flush=True)
            log.until(lambda: log.steps_since_session >= 2)
            nodes[victim].start()
    seconds = [float(line["step"]) for line in times]
    print(
        f"{kills} kills: next applied step after {statistics.median(seconds):.1f} s (median), "
        f"{max(seconds):.1f} s at most"
    )
    return times


def _killed(node: _Node, log: _Log) -> dict[str, float]:
    log.read()
    began = time.monotonic()
    sessions = log.sessions
    node.kill()
    found: dict[str, float] = {}
    log.until(lambda: log.sessions > sessions)
    found["session"] = round(time.monotonic() - began, 2)
    log.until(lambda: log.steps_since_session >= 1)
    found["step"] = round(time.monotonic() - began, 2)
    return found


@dataclass
class _Node:
    number: int
    folder: Path
    port: int
    command: list[str]
    _agent: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        environment = os.environ | {
            "NODES": "1:2",
            "RANKS": "1",
            "ADDRESS": "127.0.0.1",
            "RDZV": "is_host=false",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        with (self.folder / f"node-{self.number}.log").open("ab") as log:
            self._agent = subprocess.Popen(self.command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """With all processes that it has started, as a node that loses its power."""
        if self._agent is None:
            return
        agent, self._agent = psutil.Process(self._agent.pid), None
        for process in (agent, *agent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


class _Log:
    """What the run has logged so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self.sessions = self.steps_since_session = self.data_ranks = 0

    def until(self, happened: object) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not happened():  # type: ignore[operator]
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run must go on within {LIMIT_SECONDS:g} s, but does not; see {self._path.parent.parent}."
                )
            time.sleep(0.05)
            self.read()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                record = json.loads(line)
                if "session" in record:
                    self.sessions, self.steps_since_session = self.sessions + 1, 0
                    self.data_ranks = record["session"]["mesh"]["data"]
                self.steps_since_session += "loss" in record


@contextmanager
def _cluster(folder: Path) -> Iterator[list[_Node]]:
    folder.mkdir(parents=True, exist_ok=True)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    options = {
        "output_dir": folder / "run",
        "data.train": made_up_text(folder / "text"),
        "data.validation": "null",
        "data.tokenizer": "null",
        "training.steps": 100_000,
        "training.log_seconds": 0,
        "training.checkpoint_every": 10,
        "engine.device": "cpu",
        "engine.timeout_seconds": 60,
    }
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    script = ["bash", "launch/elastic.sh", f"127.0.0.1:{store.port}", "configs/demo-headless.yaml", *settings]
    nodes = [_Node(number, folder, store.port, script) for number in range(2)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def made_up_text(prefix: Path) -> Path:
    """Two million made-up tokens of the demo's vocabulary."""
    if not prefix.with_suffix(".idx").exists():
        generator = np.random.default_rng(0)
        with IndexedDatasetWriter(prefix, vocab_size=16384) as writer:
            for _ in range(1000):
                writer.add_document([*(generator.zipf(1.3, 2000) % 16383 + 1).tolist(), 0])
    return prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default: 1)")
    parser.add_argument("--folder", type=Path, help="where data, run and logs go (default: a temporary folder)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the times there")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        times = measure(arguments.folder or Path(temporary), arguments.kills, arguments.seed)
    if arguments.output:
        arguments.output.write_text(to_json(times), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
