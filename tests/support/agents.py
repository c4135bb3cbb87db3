"""torchrun's agents, forked: each on a host of its own, its ranks forked from it, so that they start in an instant.

The agent, the rendezvous and the command are the real ones; only that ranks import nothing again is not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, launch_agent

import support.heavy_imports  # noqa: F401 - else every rank would load it again
from megahead.commands.pretrain import main
from megahead.distributed.agent import keep_rendezvous_open
from megahead.errors import exit_immediately
from soak.hosts import Host
from support.forked import FORK
from support.killable import speak_to

Sabotage = Callable[[int], None]

QUICK = {"keep_alive_interval": 1, "keep_alive_max_attempt": 6, "last_call_timeout": 3, "read_timeout": 4}
"""A rendezvous that gives up within seconds, but not because its machine is busy."""


@dataclass(frozen=True)
class Node:
    """A host with an agent; what it and its ranks say is in `log`."""

    host: Host
    number: int
    folder: Path
    meeting: str
    """Where agents meet."""

    command: Sequence[str]
    """What is given to launch/pretrain.py."""

    sabotage: Sabotage = lambda number: None
    """Called in the agent, and so for each of its ranks, with the node's number."""

    most: int = 4
    """Nodes."""

    restarts: int = 100
    rendezvous: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / f"node-{self.number}.log"

    def start(self) -> BaseProcess:
        """The agent."""
        self.log.unlink(missing_ok=True)
        agent = FORK.Process(target=self._run)
        agent.start()
        return agent

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def says(self, text: str, seconds: float = 30, times: int = 1) -> None:
        """Waits until it has said that."""
        deadline = time.monotonic() + seconds
        while self.said().count(text) < times:
            assert time.monotonic() < deadline, f"no {text!r} on node {self.number}:\n{self.said()}"
            time.sleep(0.02)

    def _run(self) -> None:
        speak_to(self.log)
        self.host.enter()
        os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DS_ACCELERATOR": "cpu"}
        keep_rendezvous_open()  # as launch/elastic.sh does
        self.sabotage(self.number)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=self.most,  # with so many they do not wait for more
            nproc_per_node=1,
            run_id="run",
            rdzv_backend="c10d",
            rdzv_endpoint=self.meeting,
            rdzv_configs={**QUICK, "is_host": self.number == 0, **self.rendezvous},
            local_addr=self.host.address,
            max_restarts=self.restarts,
            monitor_interval=0.1,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(redirects=Std.NONE),
        )
        try:
            launch_agent(config, _rank, [list(self.command)])
        except Exception as error:
            print(f"the agent ends: {type(error).__name__}", flush=True)
            os._exit(1)
        os._exit(0)


def _rank(command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's
    torch.set_num_threads(1)
    sys.argv = ["pretrain.py", *command]
    try:
        main()
    except SystemExit as leaving:
        if leaving.code:  # else the agent waits for what this returns
            exit_immediately(int(leaving.code))
