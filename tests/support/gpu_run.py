"""Small runs by commands of their own, on a GPU or beside it on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from megahead.report.read import read_metrics
from support.commands import SCRIPT
from support.small_run import small_config


def said(script: str, run: Path, changes: dict[str, Any], *options: str) -> str:
    """What a command says that takes the config of a small run of 20 steps in the folder `run`."""
    path = run.with_suffix(".yaml")
    given = {"output_dir": str(run), "training.steps": 20, "engine.compile": False} | changes
    path.write_text(yaml.safe_dump(small_config(run.parent, given).model_dump(mode="json")))
    command = [sys.executable, script, "--config", str(path), *options]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def curve(
    folder: Path, device: str, changes: dict[str, Any], name: str = "", resume: str = "auto", script: str = SCRIPT
) -> list[float]:
    """Losses of the run `folder`/NAME (else the device's name)."""
    run = folder / (name or device)
    told = said(script, run, {"engine.device": device} | changes, "--resume", resume)
    compiled = changes.get("engine.compile", False)
    assert ("compiled    one block for all layers" in told) == (device == "cuda" if compiled == "auto" else compiled)
    assert ("graphs      one for each shape" in told) == bool(changes.get("engine.graphs"))
    assert "are not compiled" not in told
    assert "are not captured" not in told
    return [record["loss"] for record in read_metrics(run).training]
