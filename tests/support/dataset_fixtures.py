"""A small tokenizer and small datasets, made once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest

from megahead.data.indexed import DatasetInfo, IndexLayout, dataset_paths, token_dtype
from megahead.data.train_tokenizer import save_tokenizer, train_bpe
from megahead.data.writer import IndexedDatasetWriter
from megahead.remote_files import ExpectedFile

SENTENCES = [f"The {word} of {other} is a {word} too.\n" for word in ("cat", "dög", "house") for other in ("tea", "語")]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_bpe(SENTENCES * 20, 280), path)
    return path


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., Path]:
    """`write_dataset(documents, vocab_size=...)` -> prefix."""

    def write(documents: list[list[int]], vocab_size: int = 1000, name: str = "data") -> Path:
        if not documents:
            return write_empty(tmp_path / name, vocab_size)
        with IndexedDatasetWriter(tmp_path / name, vocab_size=vocab_size) as writer:
            for document in documents:
                writer.add_document(document)
        return tmp_path / name

    return write


def write_empty(prefix: Path, vocab_size: int = 1000) -> Path:
    """A dataset without a token, as preprocessing left one before it refused to."""
    bin_path, idx_path, info_path = dataset_paths(prefix)
    index = IndexLayout(token_dtype(vocab_size), 0, 1).pack() + bytes(8)
    prefix.parent.mkdir(exist_ok=True)
    bin_path.write_bytes(b"")
    idx_path.write_bytes(index)
    info = DatasetInfo(
        tokens=0,
        documents=0,
        text_bytes=0,
        vocab_size=vocab_size,
        tokenizer=None,
        token_counts=[0] * vocab_size,
        bin=ExpectedFile(0, hashlib.sha256(b"").hexdigest()),
        idx=ExpectedFile(len(index), hashlib.sha256(index).hexdigest()),
    )
    info_path.write_bytes(info.dump())
    return prefix


@pytest.fixture
def flat_dataset(write_dataset: Callable[..., Path]) -> Callable[[int], Path]:
    """`flat_dataset(n)` -> prefix of the tokens 0 .. n - 1 in documents of uneven length."""

    def write(tokens: int) -> Path:
        cuts = np.cumsum([7, 1, 30, 2, 100])
        parts = np.split(np.arange(tokens), cuts[cuts < tokens])
        return write_dataset([part.tolist() for part in parts], vocab_size=max(tokens, 1))

    return write


@pytest.fixture
def json_lines(tmp_path: Path) -> Callable[..., Path]:
    """`json_lines(texts, name=...)` -> a `.jsonl` file with one text a line."""

    def write(texts: list[str], name: str = "text.jsonl", key: str = "text") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(orjson.dumps({key: text}) + b"\n" for text in texts))
        return path

    return write
