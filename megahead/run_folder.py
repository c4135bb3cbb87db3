"""Where everything is in a run's folder, for all code that writes or reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import overload

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class _In:
    """An attribute of a run's folder: the path of this name in it."""

    name: str

    @overload
    def __get__(self, run: None, owner: type[RunFolder]) -> _In: ...

    @overload
    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path: ...

    def __get__(self, run: RunFolder | None, owner: type[RunFolder]) -> Path | _In:
        return self if run is None else run / self.name


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, which need not exist yet; it can be used wherever a path can."""

    path: Path

    @staticmethod
    def of(place: Path) -> RunFolder:
        """The run to which `place` belongs: a run folder, its `checkpoints`, or one checkpoint; links are followed.

        A checkpoint that was moved out of its run folder counts as a run folder itself.
        """
        for path in (place.absolute(), place.resolve()):
            if path.parent.name == _CHECKPOINTS:
                return RunFolder(path.parent.parent)
            if path.name == _CHECKPOINTS:
                return RunFolder(path.parent)
        return RunFolder(place)

    config = _In("config.yaml")
    """Every setting, as the run has it."""

    metrics = _In("metrics.jsonl")
    """What training logged, one JSON object per line."""

    tensorboard = _In("tensorboard")
    """The same curves for TensorBoard."""

    checkpoints = _In(_CHECKPOINTS)
    """A folder for each, see `checkpoints/disk.py`."""

    @property
    def tokenizer(self) -> Path:
        """A copy of `data.tokenizer`, by the name of its kind."""
        return self.tokenizer_model if self.tokenizer_model.is_file() else self.tokenizer_json

    tokenizer_json = _In("tokenizer.json")
    """The copy of a `tokenizer.json`."""

    tokenizer_model = _In("tokenizer.model")
    """The copy of a SentencePiece `.model`; older runs have it as `tokenizer.json`."""

    model = _In("model.yaml")
    """Which model it is, as a config says it; in folders of `convert`, from which the next run starts."""

    published_files = _In("published.zip")
    """What the Hugging Face folder that it began from holds beside weights, see `hf/settings.py`."""

    ending = _In("ending.json")
    """How the last session ended; missing while one runs, and after one that was killed."""

    session = _In("session")
    """Which process trains there now; left behind by one that was killed."""

    run_id = _In("run-id")
    """What `training.remote_checkpoints` knows the run by."""

    fetched_checkpoints = _In("fetched")
    """Checkpoints of other runs, from a remote store, while a session begins with one."""

    exports = _In("exports")
    """Hugging Face folders of its checkpoints, made when a command needs one."""

    samples = _In("samples.jsonl")
    """Texts that it generated, for the report, one JSON object per line."""

    geometry = _In("geometry.json")
    """How its checkpoints' outputs and embeddings lie, measured for the report."""

    report = _In("report.html")
    """The default place of its HTML page."""

    curves = _In("curves.png")
    """The default place of the picture of its metrics."""

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)
