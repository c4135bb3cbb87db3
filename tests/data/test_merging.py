"""Merged datasets hold all sequences and documents of their parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megahead.data import indexed
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import merge_datasets
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError

Write = Callable[..., Path]


def write_sequences(prefix: Path, lengths: list[int], documents: list[int], vocab_size: int = 1000) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size=vocab_size) as writer:
        tokens = np.arange(sum(lengths)) % vocab_size
        writer.add_documents(tokens, np.array(lengths), sequences=np.array(documents, np.int64))
    return prefix


def test_merging_equals_writing_at_once(write_dataset: Write, tmp_path: Path) -> None:
    parts = [[[1, 2, 3], [4]], [], [[5, 6], [7, 8, 9, 10]]]
    prefixes = [write_dataset(part, name=f"part{i}") for i, part in enumerate(parts)]
    whole = write_dataset([document for part in parts for document in part], name="whole")
    merge_datasets(prefixes, tmp_path / "merged")
    for ending in (".bin", ".idx", ".json"):
        assert Path(f"{tmp_path / 'merged'}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_documents_of_several_sequences_are_kept(
    write_dataset: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(indexed, "BLOCK_TOKENS", block)
    first = write_dataset([[1, 2, 3], [4]], name="first")
    second = write_sequences(tmp_path / "second", [2, 3, 4, 1, 6], [2, 0, 3])
    merged = merge_datasets([first, second, first], tmp_path / "merged")
    assert merged.sizes.tolist() == [3, 1, 2, 3, 4, 1, 6, 3, 1]
    assert merged.document_index.tolist() == [0, 1, 2, 4, 4, 7, 8, 9]
    flat = [1, 2, 3, 4, *range(16), 1, 2, 3, 4]
    assert merged.read(0, merged.num_tokens).tolist() == flat


def test_preshuffled_rows_stay_without_documents(tmp_path: Path, write_dataset: Write) -> None:
    parts = [write_sequences(tmp_path / f"rows{i}", [5] * 3, []) for i in range(2)]
    merged = merge_datasets(parts, tmp_path / "merged")
    assert (len(merged), merged.num_documents, merged.document_index.tolist()) == (6, 0, [0])
    with pytest.raises(DataError, match="equal kinds of rows"):
        merge_datasets([parts[0], write_dataset([[1]])], tmp_path / "mixed")
    assert not list(tmp_path.glob("mixed*"))


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_datasets_of_others_have_no_description(tmp_path: Path, vocab_size: int) -> None:
    parts = [write_sequences(tmp_path / f"part{i}", [3, 4], [1, 1], vocab_size) for i in range(2)]
    Path(f"{parts[0]}.json").unlink()
    merged = merge_datasets(parts, tmp_path / "merged")
    assert merged.dtype == IndexedDataset(parts[0]).dtype
    assert merged.info is not None
    assert (merged.info.text_bytes, sum(merged.info.token_counts)) == (0, 14)


def test_what_does_not_belong_together_is_refused(tmp_path: Path, write_dataset: Write) -> None:
    small, large = write_dataset([[1]], 1000, "small"), write_dataset([[1]], 70_000, "large")
    other = write_dataset([[1]], 1001, "other")
    with pytest.raises(DataError, match=r"equal token types, but .* has uint16 and .* int32"):
        merge_datasets([small, large], tmp_path / "merged")
    with pytest.raises(DataError, match="equal vocabulary sizes"):
        merge_datasets([small, other], tmp_path / "merged")
    with pytest.raises(DataError, match="equal vocabulary sizes"):
        merge_datasets([write_dataset([], 1000, "empty"), small, other], tmp_path / "merged")
    with pytest.raises(DataError, match="is one of those to merge"):
        merge_datasets([other, small], tmp_path / "x" / ".." / "small")
    assert len(IndexedDataset(small)) == 1


def test_an_output_that_is_there_is_replaced_only_when_told(tmp_path: Path, write_dataset: Write) -> None:
    part, valuable = write_dataset([[1, 2]], name="part"), write_dataset([[3, 4, 5]], name="valuable")
    with pytest.raises(DataError, match=r"valuable\.bin` must not exist yet, but does; .* --overwrite"):
        merge_datasets([part], valuable)
    assert IndexedDataset(valuable)[0].tolist() == [3, 4, 5]
    assert merge_datasets([part], valuable, overwrite=True)[0].tolist() == [1, 2]
