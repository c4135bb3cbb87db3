"""Reads a run folder for the report: metrics, configuration, generated samples, and how the run ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megahead.errors import DataError
from megahead.evaluate.result_cache import ResultCache
from megahead.report.metrics import Record, RunMetrics, read_all_metrics
from megahead.run_folder import RunFolder

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run's folder holds; what is missing there is empty."""

    folder: RunFolder
    metrics: RunMetrics

    config: Config
    """RUN/config.yaml as it was written, section by section; not checked, so that runs of any age can be read."""

    geometry: Sequence[Record]
    """{"step", "tokens", "seconds", "gradient_share", ...} of each checkpoint that was measured"""

    samples: Sequence[Record]
    """{"prompt", "text", ...} for each line of RUN/samples.jsonl, which `megahead generate --output` writes"""

    ending: str | None
    """finished, out of time or stopped; None while a session runs, or after one that was killed"""

    @property
    def name(self) -> str:
        return self.metrics.name

    def number(self, path: str) -> float | None:
        """The number at `section.field`, or None if the configuration has none there."""
        value = self._setting(path)
        return value if isinstance(value, (int, float)) else None

    def text(self, path: str) -> str | None:
        """As `number`, of texts."""
        value = self._setting(path)
        return value if isinstance(value, str) else None

    def _setting(self, path: str) -> Any:
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, named as by `read_all_metrics`. Raises UserError as `read_metrics`."""
    found = zip(folders, read_all_metrics(folders), strict=True)
    return [_read(RunFolder(folder), metrics) for folder, metrics in found]


def _read(folder: RunFolder, metrics: RunMetrics) -> Run:
    config, ending = _config(folder.config), _ending(folder.ending)
    return Run(folder, metrics, config, _geometry(folder.geometry), _samples(folder.samples), ending)


def _config(path: Path) -> Config:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _geometry(path: Path) -> list[Record]:
    try:
        return sorted(ResultCache(path).entries, key=lambda entry: int(entry["step"]))
    except (DataError, KeyError, ValueError):
        return []


def _samples(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a text may hold other ends of lines
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):  # cut short
            found.append(json.loads(line))
    return [sample for sample in found if isinstance(sample, dict) and {"prompt", "text"} <= sample.keys()]


def _ending(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["ending"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
