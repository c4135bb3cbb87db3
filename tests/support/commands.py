"""Starts the training command in processes of its own, as users do."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import yaml

from megahead.report.metrics import read_metrics
from support.forked import ROOT
from support.small_run import small_config, write_text

SCRIPT = str(ROOT / "launch/pretrain.py")


def config_file(folder: Path, changes: dict[str, object] | None = None) -> str:
    write_text(folder)
    tree = small_config(folder, changes).model_dump(mode="json")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def call(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "run").training]
