"""A run's log as training writes it, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def training(step: int, **values: Any) -> dict[str, Any]:
    line = {"step": step, "tokens": 100 * step, "seconds": 2.0 * step, "loss": 9.0 / step, "learning_rate": 1e-3}
    return {**line, "gradient_norm": 1.0, "tokens_per_second": 50.0, **values}


def evaluation(step: int, perplexity: float) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "seconds": 2.0 * step, "validation": {"perplexity": perplexity}}


def write_run(folder: Path, *records: dict[str, Any], tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder
