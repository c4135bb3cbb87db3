"""How outputs and embeddings lie along a run, measured once per checkpoint and kept in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict

from megahead.checkpoints.folders import step_of, steps_in
from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.evaluate.geometry import measure_geometry
from megahead.evaluate.results import ResultCache
from megahead.run_folder import RunFolder


def add_geometry(folder: RunFolder, describe: Callable[[str], None] = print) -> None:
    """Measures the run's checkpoints that were not measured yet, see `evaluate.geometry`; what is done is kept when it
    is interrupted. UserErrors as there."""
    known = ResultCache(folder.geometry)
    for path in sorted(steps_in(folder.checkpoints), key=step_of):
        checkpoint = open_checkpoint(path)
        key = {"step": checkpoint.step, "weights": _fingerprint(checkpoint)}
        if known.find(key) is None:
            describe(f"measuring {path}")
            where = {name: checkpoint.state.get(name, 0) for name in ("tokens", "seconds")}
            known.add(key, where | asdict(measure_geometry(path)), replaces=["step"])


def _fingerprint(checkpoint: Checkpoint) -> str:
    sums = sorted(entry.sha256 for entry in checkpoint.files.values())
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]
