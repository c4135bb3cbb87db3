"""Paths of the files in a run's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CHECKPOINTS = "checkpoints"
# earlier versions named orphaned checkpoints `abandoned-...`, and ones that they were replacing `... .replaced`
_CHECKPOINT = re.compile(r"(?:abandoned-)?(?:step-)?\d+(?:-[0-9a-f]+)?(?:\.replaced)?")


@dataclass(frozen=True)
class _File:
    """A descriptor: the path of the file or folder `name` in a run's folder."""

    name: str

    def __get__(self, run: RunFolder | None, owner: type[RunFolder]) -> Path:
        return Path(self.name) if run is None else run / self.name


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, an os.PathLike; it need not exist."""

    path: Path

    @staticmethod
    def of(path: Path) -> RunFolder:
        """The run of `path`, which is a run folder, its `checkpoints` or one checkpoint; follows links.

        A checkpoint outside of a run folder counts as a run folder.
        """
        is_run = any((path / file).exists() for file in ("config.yaml", _CHECKPOINTS))  # in a folder of any name
        for absolute in () if is_run else (path.absolute(), path.resolve()):
            if absolute.parent.name == _CHECKPOINTS and _CHECKPOINT.fullmatch(absolute.name):
                return RunFolder(absolute.parent.parent)
            if absolute.name == _CHECKPOINTS:
                return RunFolder(absolute.parent)
        return RunFolder(path)

    config = _File("config.yaml")
    """All settings of the run."""

    metrics = _File("metrics.jsonl")
    """The training log, one JSON object per line."""

    tensorboard = _File("tensorboard")
    """The same log for TensorBoard."""

    checkpoints = _File(_CHECKPOINTS)
    """See `checkpoints/disk.py`."""

    @property
    def tokenizer(self) -> Path:
        """The copy of `data.tokenizer`, of either kind."""
        return self.tokenizer_model if self.tokenizer_model.is_file() else self.tokenizer_json

    tokenizer_json = _File("tokenizer.json")
    """The copy of a `tokenizer.json`."""

    tokenizer_model = _File("tokenizer.model")
    """The copy of a SentencePiece `.model`; in older runs it is `tokenizer.json`."""

    model = _File("model.yaml")
    """In folders that `convert` wrote: the `model` section (an encoder's special tokens, too) for the config of a run
    that starts from them."""

    source_hf_files = _File("published.zip")
    """The files other than weights of the Hugging Face folder that the run started from, see `hf/settings.py`."""

    session_end = _File("ending.json")
    """How the last session ended; missing while one runs, or if it was killed."""

    session = _File("session")
    """The id of the session (one start of the run's processes) that trains here, or of one that was killed."""

    run_id = _File("run-id")
    """The id of the run in `training.remote_checkpoints`."""

    fetched_checkpoints = _File("fetched")
    """Remote checkpoints of other runs, while a session starts from one."""

    exports = _File("exports")
    """Hugging Face folders of checkpoints that commands have exported."""

    samples = _File("samples.jsonl")
    """Generated texts for the report, one JSON object per line."""

    geometry = _File("geometry.json")
    """What `report --geometry` measured by checkpoint: the share of the gradient that reaches the outputs; effective
    rank and anisotropy of outputs and embeddings."""

    report = _File("report.html")
    """The default path of the HTML report."""

    curves = _File("curves.png")
    """The default path of the plot of its metrics."""

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)
