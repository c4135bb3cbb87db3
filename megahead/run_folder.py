"""Where everything is in a run's folder, for all code that writes or reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CHECKPOINTS = "checkpoints"


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

    @property
    def config(self) -> Path:
        """Every setting, as the run has it."""
        return self / "config.yaml"

    @property
    def metrics(self) -> Path:
        """What training logged, one JSON object per line."""
        return self / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The same curves for TensorBoard."""
        return self / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """A folder for each, see `checkpoints/disk.py`."""
        return self / _CHECKPOINTS

    @property
    def tokenizer(self) -> Path:
        """A copy of `data.tokenizer`, by the name of its kind."""
        return self.tokenizer_model if self.tokenizer_model.is_file() else self.tokenizer_json

    @property
    def tokenizer_json(self) -> Path:
        """The copy of a `tokenizer.json`."""
        return self / "tokenizer.json"

    @property
    def tokenizer_model(self) -> Path:
        """The copy of a SentencePiece `.model`; older runs have it as `tokenizer.json`."""
        return self / "tokenizer.model"

    @property
    def published(self) -> Path:
        """What the Hugging Face folder that it began from holds beside weights, see `convert/kept_settings.py`."""
        return self / "published.zip"

    @property
    def ending(self) -> Path:
        """How the last session ended; missing while one runs, and after one that was killed."""
        return self / "ending.json"

    @property
    def holder(self) -> Path:
        """Which process trains there now; left behind by one that was killed."""
        return self / "session"

    @property
    def identity(self) -> Path:
        """What `training.mirror` knows the run by."""
        return self / "run-id"

    @property
    def fetched(self) -> Path:
        """Checkpoints of other runs, from a remote store, while a session begins with one."""
        return self / "fetched"

    @property
    def exports(self) -> Path:
        """Hugging Face folders of its checkpoints, made when a command needs one."""
        return self / "exports"

    @property
    def samples(self) -> Path:
        """Texts that it generated, for the report, one JSON object per line."""
        return self / "samples.jsonl"

    @property
    def geometry(self) -> Path:
        """How its checkpoints' outputs and embeddings lie, measured for the report."""
        return self / "geometry.json"

    @property
    def report(self) -> Path:
        """The default place of its HTML page."""
        return self / "report.html"

    @property
    def curves(self) -> Path:
        """The default place of the picture of its metrics."""
        return self / "curves.png"

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)
