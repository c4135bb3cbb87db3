"""Rows cut from a run of text: all of it, in a seeded order, whatever the batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megahead.data.indexed import HEADER, MAGIC, IndexedDataset
from megahead.data.samples import ConcatenatedSamples, SequentialSamples
from megahead.errors import DataError

Flat = Callable[[int], Path]
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(tokens=st.integers(2, 400), length=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_covers_the_text_once(flat_dataset: Flat, tokens: int, length: int, seed: int, epoch: int) -> None:
    if tokens < 2 * length:
        return
    samples = ConcatenatedSamples(IndexedDataset(flat_dataset(tokens)), length, seed)
    n = (tokens - length) // length
    rows = samples.read(range(epoch * n, (epoch + 1) * n))[0]
    assert samples.rows_per_epoch == n
    assert rows.shape == (n, length + 1)
    assert (np.diff(rows, axis=1) == 1).all()  # each row is one run of the text, over document boundaries
    first = samples.offset(epoch)
    assert 0 <= first < length
    assert sorted(rows[:, 0]) == list(range(first, first + n * length, length))


def test_epochs_differ_in_order_and_offset(flat_dataset: Flat) -> None:
    samples = ConcatenatedSamples(IndexedDataset(flat_dataset(2000)), 10, 1)
    rows = samples.read(range(4 * samples.rows_per_epoch))[0].reshape(4, samples.rows_per_epoch, 11)
    assert len({samples.offset(epoch) for epoch in range(4)}) > 1
    assert not np.array_equal(rows[0] - samples.offset(0), rows[1] - samples.offset(1))


def test_the_order_depends_on_the_sample_alone(flat_dataset: Flat) -> None:
    dataset = IndexedDataset(flat_dataset(500))
    indices = [7, 0, 123, 49, 48, 7, 1000]
    together = ConcatenatedSamples(dataset, 10, 3).read(indices)[0]
    one_by_one = [ConcatenatedSamples(dataset, 10, 3).read([index])[0][0] for index in indices]
    assert np.array_equal(together, one_by_one)
    assert together.dtype == np.int64
    assert not np.array_equal(together, ConcatenatedSamples(dataset, 10, 4).read(indices)[0])
    assert ConcatenatedSamples(dataset, 10, 3).read([])[0].shape == (0, 11)


@pytest.mark.parametrize("tokens", [60, 40_000])
def test_reading_ahead_changes_nothing(flat_dataset: Flat, tokens: int) -> None:
    plain, ahead = IndexedDataset(flat_dataset(tokens)), IndexedDataset(flat_dataset(tokens))
    ahead.expect_random_access()
    indices = range(3 * ((tokens - 30) // 30))
    assert np.array_equal(
        ConcatenatedSamples(plain, 30, 1).read(indices)[0], ConcatenatedSamples(ahead, 30, 1).read(indices)[0]
    )


@pytest.mark.slow
def test_ten_million_documents_open_at_once(tmp_path: Path) -> None:
    """A real index over an empty (sparse) file: opened and the first row drawn without reading the index."""
    n = 10_000_000
    sizes = np.full(n, 700, "<i4")
    with (tmp_path / "big.idx").open("wb") as idx:
        idx.write(HEADER.pack(MAGIC, 1, 8, n, n + 1) + sizes.tobytes())
        idx.write((np.arange(n, dtype="<i8") * 1400).tobytes() + np.arange(n + 1, dtype="<i8").tobytes())
    with (tmp_path / "big.bin").open("wb") as tokens:
        tokens.truncate(n * 1400)
    started = time.thread_time()
    dataset = IndexedDataset(tmp_path / "big")
    dataset.expect_random_access()
    samples = ConcatenatedSamples(dataset, 2048, 0)
    assert samples.read([0])[0].shape == (1, 2049)
    assert time.thread_time() - started < 0.05
    assert len(dataset) == n


def test_sequential_rows_keep_the_order_of_the_file(flat_dataset: Flat) -> None:
    samples = SequentialSamples(IndexedDataset(flat_dataset(100)), 11)
    rows = samples.read(range(samples.rows_per_epoch))[0]
    assert np.array_equal(rows[:, 1:].reshape(-1), np.arange(1, 100))  # 99 targets, each once
    assert np.array_equal(samples.read([samples.rows_per_epoch])[0], samples.read([0])[0])


@pytest.mark.parametrize(("kind", "least"), [(ConcatenatedSamples, 100), (SequentialSamples, 51)])
def test_too_short_a_dataset_is_reported(flat_dataset: Flat, kind: type, least: int) -> None:
    seed = () if kind is SequentialSamples else (0,)
    assert kind(IndexedDataset(flat_dataset(least)), 50, *seed).read([0, 5])[0].shape == (2, 51)
    with pytest.raises(DataError, match=rf"at least {least} tokens .*, but holds {least - 1}"):
        kind(IndexedDataset(flat_dataset(least - 1)), 50, *seed)


def test_negative_samples_are_refused(flat_dataset: Flat) -> None:
    with pytest.raises(IndexError):
        SequentialSamples(IndexedDataset(flat_dataset(50)), 10).read([-1])
