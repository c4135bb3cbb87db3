"""A run is told when its end token is not the one that closes its documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megahead.config.data import DataConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import lacks_document_boundaries, require_end_tokens
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import ConfigError

Write = Callable[..., Path]
CLOSED_BY_9 = [[7, 3, 3, 9], [3, 9], [], [5, 5, 5, 9]]


def settings(**changes: Any) -> DataConfig:
    return DataConfig(train="x", sequence_length=4, **changes)


@pytest.mark.parametrize("end_token", [0, 5, 3, 999, 1_000_000])
def test_another_id_than_the_one_that_closes_documents(write_dataset: Write, end_token: int) -> None:
    """0 never occurs, 5 and 3 as often as documents end (the counts alone would let 3 and 5 pass)."""
    dataset = IndexedDataset(write_dataset(CLOSED_BY_9))
    with pytest.raises(ConfigError, match=rf"`data\.end_token` must be the id .*, but is {end_token} \("):
        require_end_tokens(settings(end_token=end_token), dataset)
    require_end_tokens(settings(end_token=9), dataset)


def test_one_document_without_its_end_is_enough_and_counts_find_it(write_dataset: Write) -> None:
    dataset = IndexedDataset(write_dataset([[5, 0]] * 500 + [[5, 5]] + [[5, 0]] * 500))
    with pytest.raises(ConfigError, match=r"it occurs 1,000 times in 1,001 documents"):
        require_end_tokens(settings(), dataset)


def test_without_counts_documents_are_looked_at(write_dataset: Write) -> None:
    prefix = write_dataset([[5, 5, 9]] * 300)
    Path(f"{prefix}.json").unlink()
    dataset = IndexedDataset(prefix)
    with pytest.raises(ConfigError, match="64 of 64 documents that were checked neither end nor begin with it"):
        require_end_tokens(settings(end_token=5_000), dataset)
    require_end_tokens(settings(end_token=9), dataset)


def test_an_end_token_may_stand_before_each_document(write_dataset: Write) -> None:
    require_end_tokens(settings(), IndexedDataset(write_dataset([[0, 5, 6], [0, 7]])))


def test_documents_of_several_sequences_end_with_the_last(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", vocab_size=10) as writer:
        tokens, lengths = np.array([5, 5, 0, 6, 0, 6, 6, 0]), np.array([2, 1, 2, 3])
        writer.add_documents(tokens, lengths, sequences=np.array([2, 2]))
    dataset = IndexedDataset(tmp_path / "data")
    assert [dataset.document(i).tolist() for i in (0, 1)] == [[5, 5, 0], [6, 0, 6, 6, 0]]
    require_end_tokens(settings(), dataset)


def test_an_end_token_that_nothing_depends_on_may_be_any(write_dataset: Write) -> None:
    dataset = IndexedDataset(write_dataset(CLOSED_BY_9))
    require_end_tokens(settings(isolate_documents=False), dataset)
    require_end_tokens(settings(pack="best_fit"), dataset, boundaries_known=True)
    with pytest.raises(ConfigError, match=r"data\.end_token"):
        require_end_tokens(settings(isolate_documents=False, boundary_targets=False), dataset)


def test_preshuffled_rows_name_no_documents_to_miss(tmp_path: Path) -> None:
    for name, end in (("none", 5), ("some", 0)):
        with IndexedDatasetWriter(tmp_path / name, vocab_size=10) as writer:
            tokens = np.tile([5, 6, 7, 8, end], 100)
            writer.add_documents(tokens, np.full(100, 5), sequences=np.empty(0, np.int64))
    none, some = (IndexedDataset(tmp_path / name) for name in ("none", "some"))
    require_end_tokens(settings(order="stored"), none)
    assert [lacks_document_boundaries(settings(order="stored"), dataset) for dataset in (none, some)] == [True, False]
    assert not lacks_document_boundaries(settings(order="stored", isolate_documents=False), none)
