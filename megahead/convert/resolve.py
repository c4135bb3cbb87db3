"""Finds the Hugging Face folder for the model a user names: a folder, or a run or checkpoint to export."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megahead.checkpoint import find_checkpoint
from megahead.config import HeadName
from megahead.convert.export_heads import best_head
from megahead.convert.exporting import PARITY_FILE, export, fingerprint
from megahead.convert.source import TrainedModel
from megahead.errors import CheckpointError


def hf_folder(path: Path) -> Path:
    """`path` if it is a Hugging Face folder; of a run or checkpoint, its export with the best head it has.

    Exports are kept in RUN/exports/ and made again when the checkpoint is another one. CheckpointError if `path`
    is neither.
    """
    return _folder(path, best_head)


def hf_folder_to_classify(path: Path) -> Path:
    """The same for what gets a classifier: of a decoder the body alone, since some classes that have its head are
    none that transformers classifies with; of an encoder as it is, as ModernBERT's classifier begins with its head."""
    return _folder(path, lambda model: best_head(model) if model.config.model.is_encoder() else "none")


def _folder(path: Path, choose_head: Callable[[TrainedModel], HeadName]) -> Path:
    if (path / "config.json").is_file():
        return path
    if find_checkpoint(path) is None:
        raise CheckpointError(f"`{path}` must be a Hugging Face model folder, a run or a checkpoint, but is none.")
    model = TrainedModel.open(path)
    head = choose_head(model)
    output = model.run_folder().exports / f"{model.checkpoint.folder.name}-{head}"
    lacks_tokenizer = model.tokenizer() is not None and not (output / "tokenizer.json").is_file()
    if lacks_tokenizer or _source(output) != fingerprint(model):
        export(model.checkpoint.folder, output, head)
    return output


@dataclass(frozen=True)
class Origin:
    """The run that an export came from, and how far it was."""

    run: str
    tokens: int


def origin(folder: Path) -> Origin:
    """Where an export of ours came from; CheckpointError for another folder."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))["megahead"]
        return Origin(content["run"], int(content["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"`{folder}` must name its run and tokens to be drawn on a curve, but does not; name the run's checkpoints."
        ) from None


def _source(folder: Path) -> str | None:
    """Which checkpoint an export came from."""
    try:
        source: str = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError):
        return None
    return source
