"""The run that is soaked: a small decoder that learns the bytes of docs/, and its undisturbed twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.soak.nodes import ROOT
from megahead.data.writer import IndexedDatasetWriter
from megahead.files import write_atomically

ENDLESS = 100_000_000
"""Steps, until it is decided when to end: the learning rate does not depend on them."""

BATCH = 12
"""Rows: for one to four ranks."""


def write_course(folder: Path, text: Path | None, ids: int) -> Path:
    """The run's config, made when the soak begins. `text`: a dataset of `ids` ids instead of docs/."""
    config = folder / "soak.yaml"
    if not config.exists():
        write_atomically(config, yaml.safe_dump(_settings(folder, text or _docs(folder / "docs"), ids)))
    return config


def _settings(folder: Path, text: Path, ids: int) -> dict[str, Any]:
    folder = folder.absolute()
    return {
        "name": "soak",
        "output_dir": str(folder / "disk/run"),
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": ids, "vocab_multiple": 64},
        "data": {"train": str(text.absolute()), "sequence_length": 128},
        "batch": {"global_size": BATCH, "micro_size": 1},
        "objective": {"name": "headless"},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "constant"},
        "training": {
            "steps": ENDLESS,
            "log_seconds": 0,
            "checkpoint_every": 100,
            "keep_checkpoints": 4,
            "copy_every": 10,
        },
        "faults": {"replicas_every": 1},  # a flipped last bit may be rounded away, but not its trace
        "engine": {"device": "cpu", "timeout_seconds": 40, "deepspeed": {"zero_optimization": {"stage": 0}}},
    }


def _docs(prefix: Path) -> Path:
    """A page a document, a byte a token; 0 ends it."""
    with IndexedDatasetWriter(prefix, vocab_size=256) as writer:
        for page in sorted((ROOT / "docs").glob("*.md")):
            writer.add_document([*page.read_bytes(), 0])
    return prefix
