"""What every experiment needs: runs of the normal command, each done once, and a record of what came out."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from megahead.config import RunConfig, load_config
from megahead.errors import UserError
from megahead.report import RunMetrics, read_metrics, to_markdown, to_rich

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Laboratory:
    """Trains named runs in `folder`, all with the overrides `settings`."""

    folder: Path
    settings: Sequence[str]
    console: Console

    def train(self, config: str, name: str, *overrides: str) -> RunMetrics:
        """`configs/CONFIG.yaml` trained to its end in `folder/NAME`, or read when it already was.

        Raises UserError with the end of its log when it fails.
        """
        run, source = self.folder / name, f"configs/{config}.yaml"
        given = [*self.settings, *overrides, f"output_dir={run}", f"name={run.name}"]
        if not _finished(run, load_config(source, given)):
            run.mkdir(parents=True, exist_ok=True)
            with self.console.status(f"training {name}"), (run / "log.txt").open("a") as log:
                command = [sys.executable, "launch/pretrain.py", "--config", source]
                command += [part for override in given for part in ("--set", override)]
                code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
            if code:
                last = "\n".join((run / "log.txt").read_text().splitlines()[-15:])
                raise UserError(f"{name} must train to its end, but failed; its last lines:\n{last}")
        metrics = read_metrics(run)
        self.console.print(f"{name}: perplexity {metrics.validation[-1]['perplexity']:,.1f}", soft_wrap=True)
        return metrics

    def record(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Prints the rows; `folder/NAME.json` holds them with how they were made, NAME.md as a table for a page."""
        made = {
            "command": [Path(sys.executable).name, *sys.argv],
            "commit": _commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
            "settings": list(self.settings),
            "results": list(rows),
        }
        (self.folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        (self.folder / f"{name}.md").write_text(to_markdown(rows), encoding="utf-8")
        self.console.print(to_rich(rows))


def _finished(run: Path, config: RunConfig) -> bool:
    """Whether the folder holds a run of just these settings that reached its last step.

    What settings did not exist yet when it ran has its default.
    """
    try:
        latest = (run / "checkpoints/latest").read_text().strip()
    except OSError:
        return False
    same = load_config(run / "config.yaml").model_dump() == config.model_dump()
    return same and latest == f"step-{config.training.steps:08d}"


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
