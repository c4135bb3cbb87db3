"""The training command as users start it, and what it needs."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import yaml

from megahead.report.read import read_metrics
from support.forked import ROOT
from support.small_run import small_config, write_text

SCRIPT = str(ROOT / "launch/pretrain.py")
DEEPSPEED, TORCHRUN = (str(Path(sys.executable).with_name(name)) for name in ("deepspeed", "torchrun"))
"""The launchers' own commands."""

CPU = {"DS_ACCELERATOR": "cpu"}
"""For ranks of a launcher."""


def config_file(folder: Path, changes: dict[str, object] | None = None) -> str:
    write_text(folder)
    tree = small_config(folder, changes).model_dump(mode="json")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def free_port() -> str:
    """A port that nobody listens on, below those that Linux gives to outgoing connections: another test's connection
    cannot take it before it is used, as it can take what `bind` to port 0 finds."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return str(port)


def call(*command: str) -> subprocess.CompletedProcess[str]:
    """What a command does; see `forked` for one that needs no interpreter of its own."""
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **CPU}, cwd=ROOT, timeout=300, check=False
    )


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "run").training]
