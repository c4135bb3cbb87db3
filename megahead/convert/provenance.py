"""The origin of a model, for its card: data, code, and its last evaluation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from megahead.checkpoint import Checkpoint
from megahead.config import DataConfig
from megahead.convert.source import TrainedModel
from megahead.version import __version__

_CHECKOUT = Path(__file__).parents[2]


def dataset_names(data: DataConfig) -> str:
    """The training datasets by the last part of their paths, with the weights of a blend."""
    parts = [(Path(part.prefix).name, part.weight) for part in data.parts()]
    return ", ".join(name if weight is None else f"{name} (weight {weight:g})" for name, weight in parts)


def code_version() -> str:
    """The version that exports, with its commit if `.git` is directly above the package: an installed copy may lie in
    another project's repository."""
    if not (_CHECKOUT / ".git").exists():
        return f"megahead {__version__}"
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"megahead {__version__}"
    return f"megahead {__version__}, commit {commit}"


def last_evaluation(model: TrainedModel) -> str | None:
    """The last evaluation before the checkpoint, from the run's metrics.jsonl (which may also hold evaluations of
    branches: steps that the run abandoned when it went on from an older checkpoint); None if there is none."""
    try:
        lines = model.run_folder().metrics.read_text(encoding="utf-8").split("\n")
    except OSError:
        return None
    sentence = None
    for line in lines:
        try:
            record = json.loads(line)
            if _is_checkpoints_own(record["step"], record["validation"].get("loss"), model.checkpoint):
                sentence = _sentence(record["step"], record["validation"])
        except (ValueError, KeyError, TypeError):  # another kind of record, or a line cut short
            continue
    return sentence


def _is_checkpoints_own(step: int, loss: float, checkpoint: Checkpoint) -> bool:
    """Whether the evaluation at `step` is one that `checkpoint` remembers, not a branch's that the run abandoned."""
    if "validation" not in checkpoint.state:  # checkpoints of the first version lack it
        return step <= checkpoint.step
    last = checkpoint.state["validation"]
    return last is not None and (step, loss) == (last["step"], last["loss"])


def _sentence(step: int, found: dict[str, Any]) -> str:
    """An evaluation in words. `found["head"]` predicted: `trained`, `tied`, or `pmi` (the training-free head)."""
    if told := found.get("detection"):
        shares = f"{told['found']:.1%} of replaced tokens found and {told['kept']:.1%} of others kept"
        return f"{shares} (step {step:,}), its generator's perplexity {found['perplexity']:,.4g}"
    bits, most = found.get("bits_per_byte"), "at most " if found.get("upper_bound") else ""
    parts = [f"perplexity {most}{found['perplexity']:,.4g}"]
    parts += [] if bits is None else [f"{most}{bits:.4g} bits a byte"]
    return f"{', '.join(parts)}, accuracy {found['accuracy']:.1%} ({found['head']} head, step {step:,})"
