"""What is read: a text that is given, else numbers by Zipf's law, from which nothing can be learned but counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu_report.part import Part
from megahead.data.writer import IndexedDatasetWriter

VOCABULARY = 50277
_DOCUMENT = 500


@dataclass(frozen=True)
class Text:
    """A dataset: one that is there, or in `folder`, made by a part of its own where `sources` and a tokenizer are
    given."""

    folder: Path
    sources: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    dataset: Path | None = None
    """Its prefix, which tools/gpu_text.py made."""

    @property
    def given(self) -> bool:
        return self.dataset is not None or (bool(self.sources) and self.tokenizer is not None)

    @property
    def prefix(self) -> Path:
        return self.dataset or self.folder / ("text" if self.given else "zipf")

    @property
    def index(self) -> Path:
        """Exists once the dataset is whole."""
        return self.prefix.with_suffix(".idx")

    def parts(self) -> list[Part]:
        """What makes it, if a text was given."""
        if not self.given or self.dataset is not None:
            return []
        sources = [str(path) for path in self.sources]
        command = ("tools/preprocess.py", "--input", *sources, "--tokenizer", str(self.tokenizer))
        options = ("--output", str(self.prefix), "--holdout", "200")
        return [Part("text", "How fast is a text turned into tokens?", (*command, *options), 40)]

    def obstacle_to_training(self) -> str:
        return "" if self.given else "a text must be given for it, by --dataset, or --text and --tokenizer, but is not."

    def settings(self) -> tuple[str, ...]:
        """Of a run that reads it."""
        validation = f"{self.prefix}-validation" if self.given else "null"
        tokenizer = self.tokenizer or "null"
        return f"data.train={self.prefix}", f"data.validation={validation}", f"data.tokenizer={tokenizer}"

    def draw(self, tokens: int) -> None:
        """So many tokens by Zipf's law, in documents that end with 0, unless a text was given or they are there."""
        if self.given or self.index.exists():
            return
        weights = 1 / (np.arange(VOCABULARY) + 2.7)
        weights[0] = 0.0
        drawn = np.random.default_rng(0).choice(VOCABULARY, (tokens // _DOCUMENT, _DOCUMENT), p=weights / weights.sum())
        drawn[:, -1] = 0
        with IndexedDatasetWriter(self.prefix, vocab_size=VOCABULARY) as writer:
            for document in drawn:
                writer.add_document(document)
