"""The first stages: a corpus from this machine, a tokenizer made from it, the corpus as ids, a last-word test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo_pipeline.cloze import build_cloze
from demo_pipeline.corpus import build_corpus
from demo_pipeline.sizes import Size
from demo_pipeline.stages import Stages
from megahead.data.preprocess import preprocess
from megahead.data.train_tokenizer import sample_texts, save_tokenizer, train_bpe
from megahead.data.writer import Bar


class Text:
    """Files in `folder`, a training and a held-out half of each; `roots` are searched for documentation."""

    def __init__(self, folder: Path, size: Size, roots: Sequence[Path]) -> None:
        self.size, self.roots = size, roots
        self.corpus, self.data = folder / "corpus", folder / "data"
        self.tokenizer, self.cloze = folder / "tokenizer.json", folder / "cloze.jsonl"

    def make(self, stages: Stages, vocab_size: int) -> None:
        """All of it, as far as it is not there."""
        roots, size = [str(root) for root in self.roots], self.size
        train, held_out = (self.corpus / f"{half}.jsonl" for half in ("train", "held_out"))
        stages.run(
            "corpus",
            lambda: build_corpus(
                self.corpus,
                roots=self.roots,
                source_bytes=size.source_bytes,
                held_out=size.held_out,
                console=stages.console,
            ).summary(),
            settings={"roots": roots, "source_bytes": size.source_bytes, "held_out": size.held_out},
            outputs=[train, held_out],
        )
        stages.run(
            "tokenizer",
            lambda: self._train_tokenizer(train, vocab_size),
            settings={"vocab_size": vocab_size, "bytes": size.tokenizer_bytes},
            inputs=[train],
            outputs=[self.tokenizer],
        )
        stages.run("index", self._index, inputs=[train, held_out, self.tokenizer], outputs=[self.data])
        stages.run(
            "cloze",
            lambda: f"{build_cloze(held_out, self.cloze)} passages whose last word is to be guessed",
            inputs=[held_out],
            outputs=[self.cloze],
        )

    def _train_tokenizer(self, text: Path, vocab_size: int) -> str:
        with Bar("Reading") as bar:
            texts = sample_texts([text], max_bytes=self.size.tokenizer_bytes, progress=bar)
            tokenizer = train_bpe(texts, vocab_size)
        save_tokenizer(tokenizer, self.tokenizer)
        return f"byte-level BPE, {tokenizer.get_vocab_size():,} ids"

    def _index(self) -> str:
        self.data.mkdir(parents=True, exist_ok=True)
        reports = []
        for half in ("train", "held_out"):
            with Bar(f"Tokenizing {half}") as bar:
                reports.append(
                    preprocess([self.corpus / f"{half}.jsonl"], self.tokenizer, self.data / half, progress=bar)
                )
        train_tokens, held_tokens = (report.tokens for report in reports)
        bytes_each = sum(report.text_bytes for report in reports) / (train_tokens + held_tokens)
        return f"{train_tokens:,} tokens and {held_tokens:,} held out, {bytes_each:.2f} bytes a token"
