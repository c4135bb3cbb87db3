"""Whole documents in rows: each token's target once, nothing over the edge, a table that cannot be wrong."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megahead.config.data import BlendPart, DataConfig
from megahead.config.masking import MaskingConfig
from megahead.data.batch import CausalCollator, EncoderRowBuilder
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader, training_samples
from megahead.data.masking import MaskingCollator
from megahead.data.samples import PADDING, PackedSamples, best_fit, pack_table
from megahead.data.strategies import Uniform
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError
from support.causal_rows import causal_batch

Write = Callable[..., Path]
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def documents(lengths: list[int]) -> list[list[int]]:
    """Documents that end with 0 and whose other tokens occur once each."""
    ends = np.cumsum([max(length - 1, 0) for length in lengths])
    parts = np.split(np.arange(1, ends[-1] + 1), ends[:-1]) if lengths else []
    return [[*part.tolist(), 0] if length else [] for part, length in zip(parts, lengths, strict=True)]


@quick
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    T=st.integers(2, 24),
    most=st.sampled_from([None, 1, 3]),
)
def test_every_target_inside_a_document_is_met_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], T: int, most: int | None
) -> None:
    prefix = tmp_path_factory.mktemp("packing") / "data"
    texts = documents(lengths)
    with IndexedDatasetWriter(prefix, vocab_size=5000) as writer:
        for text in texts:
            writer.add_document(text)
    dataset = IndexedDataset(prefix)
    samples = PackedSamples(dataset, T, 1, pack_table(dataset, T, most))
    rows = samples.read(range(samples.rows_per_epoch))[0]
    pairs = [(a, b) for row in rows.tolist() for a, b in pairwise(row) if a > 0 and b >= 0]
    assert sorted(pairs) == sorted((a, b) for text in texts for a, b in pairwise(text))
    if most is not None:
        assert np.diff(samples.table.starts_R1).max() <= most
    batch = causal_batch(rows, end_token=0, isolate_documents=True, boundary_targets=False)
    met = zip(batch.input_ids_BT.flatten()[batch.target_index_N].tolist(), batch.target_ids_N.tolist(), strict=True)
    assert sorted(met) == sorted(pairs)


def test_the_tightest_row_is_taken() -> None:
    rows = best_fit(np.array([5, 3, 9, 1, 4, 2]), capacity=10, max_documents=None)
    assert [sorted(row) for row in rows] == [[2], [0, 3, 4], [1, 5]]
    assert [len(row) for row in best_fit(np.ones(7, int), capacity=10, max_documents=3)] == [3, 3, 1]


def test_short_documents_waste_little(write_dataset: Write) -> None:
    lengths = np.random.default_rng(0).integers(2, 400, 3000).tolist()
    table = pack_table(IndexedDataset(write_dataset(documents(lengths), vocab_size=2_000_000)), 512)
    assert table.empty_share(513) < 0.002


def test_padding_is_neither_read_nor_predicted() -> None:
    rows = np.array([[5, 6, 0, 7, 0, PADDING, PADDING]])
    batch = causal_batch(rows, end_token=0, isolate_documents=True, boundary_targets=True)
    assert batch.input_ids_BT.tolist() == [[5, 6, 0, 7, 0, 0]]
    assert batch.target_index_N.tolist() == [0, 1, 2, 3]
    assert batch.target_ids_N.tolist() == [6, 0, 7, 0]
    assert batch.positions_BT is not None
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0]]
    alone = causal_batch(rows, end_token=0, isolate_documents=True, boundary_targets=False)
    assert alone.target_index_N.tolist() == [0, 1, 3]


def test_epochs_differ_and_resume_anywhere(write_dataset: Write) -> None:
    dataset = IndexedDataset(write_dataset(documents([9] * 60), vocab_size=5000))
    samples = PackedSamples(dataset, 20, 5, pack_table(dataset, 20))
    n = samples.rows_per_epoch
    rows = samples.read(range(2 * n))[0]
    assert not np.array_equal(rows[:n], rows[n:])
    assert np.array_equal(np.sort(rows[:n], axis=0), np.sort(rows[n:], axis=0))
    assert np.array_equal(PackedSamples(dataset, 20, 5, pack_table(dataset, 20)).read([n + 3])[0][0], rows[n + 3])


def test_a_damaged_table_is_refused_and_other_data_gets_its_own(write_dataset: Write) -> None:
    prefix = write_dataset(documents([9, 4, 4]))
    pack_table(IndexedDataset(prefix), 10)
    (path,) = prefix.parent.glob("data.pack-*.rows")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="must be a complete table of rows"):
        pack_table(IndexedDataset(prefix), 10)
    path.write_bytes(data[:100])
    with pytest.raises(DataError, match="must be a complete table of rows"):
        pack_table(IndexedDataset(prefix), 10)
    write_dataset(documents([9, 3, 5]))
    assert len(pack_table(IndexedDataset(prefix), 10)) == 2  # another table: the lengths differ
    assert len(list(prefix.parent.glob("data.pack-*.rows"))) == 2


def test_documents_must_be_known(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "rows", vocab_size=10) as writer:
        writer.add_documents(np.ones(20, np.int64), np.array([10, 10]), sequences=np.empty(0, np.int64))
    with pytest.raises(DataError, match="must list its documents to be packed"):
        pack_table(IndexedDataset(tmp_path / "rows"), 9)


@pytest.mark.parametrize("locks", [True, False])
def test_many_processes_make_one_table(write_dataset: Write, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """Also where the file system has no locks: on many network file systems `flock` is not implemented."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", unimplemented)
    prefix = write_dataset(documents([7] * 2000), vocab_size=20_000)
    context = multiprocessing.get_context("fork")
    start, tables = context.Barrier(4), context.Queue()

    def work() -> None:
        start.wait()
        table = pack_table(IndexedDataset(prefix), 50)
        tables.put((len(table), table.lengths_P.sum()))

    for process in [context.Process(target=work) for _ in range(4)]:
        process.start()
    assert {tables.get(timeout=30) for _ in range(4)} == {(286, 14_000)}
    assert sorted(path.suffix for path in prefix.parent.iterdir()) == [".bin", ".idx", ".json", ".rows"]


def unimplemented(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@quick
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any), seed=st.integers(0, 3))
def test_documents_without_end_tokens_never_see_each_other(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    """Nor does one predict the next: it is the same as with end tokens, less those."""
    prefix = tmp_path_factory.mktemp("packing") / "data"
    texts = [[number + 1] * length for number, length in enumerate(lengths)]
    with IndexedDatasetWriter(prefix, vocab_size=100) as writer:
        for text in texts:
            writer.add_document(text)
    data = DataConfig(train=str(prefix), sequence_length=15, pack="best_fit", boundary_targets=False)
    samples = training_samples(data, [IndexedDataset(prefix)], seed, data.sequence_length)
    batch = BatchReader(samples, CausalCollator(data)).read(range(samples.rows_per_epoch))
    inputs, positions = batch.input_ids_BT, batch.positions_BT
    if positions is None:
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    document_starts = positions == 0
    assert document_starts[:, 0].all()
    assert torch.equal(document_starts[:, 1:], (inputs[:, 1:] != inputs[:, :-1]) | (inputs[:, 1:] == 0))
    met = zip(inputs.flatten()[batch.target_index_N].tolist(), batch.target_ids_N.tolist(), strict=True)
    assert sorted(met) == sorted((text[0], text[0]) for text in texts for _ in text[1:])


def test_a_blend_keeps_what_its_parts_know(write_dataset: Write) -> None:
    packed, closed = write_dataset([[5, 5, 5]] * 39, name="packed"), write_dataset([[6, 6, 0]] * 39, name="closed")
    parts = [BlendPart(prefix=str(packed)), BlendPart(prefix=str(closed))]
    data = DataConfig(train=parts, sequence_length=9, pack="best_fit")
    blend = training_samples(data, [IndexedDataset(packed), IndexedDataset(closed)], 1, data.sequence_length)
    positions = BatchReader(blend, CausalCollator(data)).read(range(12)).positions_BT
    assert positions is not None
    assert positions.tolist() == [[0, 1, 2] * 3] * 12
    stream = training_samples(
        data.model_copy(update={"pack": "stream"}), [IndexedDataset(packed)] * 2, 1, data.sequence_length
    )
    assert not stream.read(range(5))[1].any()


def test_an_encoders_rows_keep_what_is_known_of_documents(write_dataset: Write) -> None:
    prefix = write_dataset([[5, 6, 7]] * 12)
    data = DataConfig(train=str(prefix), sequence_length=9, pack="best_fit", end_token=9)
    samples = training_samples(data, [IndexedDataset(prefix)], 1, 6)
    masking = MaskingConfig(mask_token=1, cls_token=2, sep_token=3)
    for isolate, expected in ((True, [0, 1, 2, 3, 0, 1, 2, 3, 0]), (False, None)):
        collator = MaskingCollator(EncoderRowBuilder(masking, 9, isolate), Uniform(), 20, seed=0)
        rows, document_starts = samples.read([0])
        assert rows.tolist() == [[5, 6, 7, 5, 6, 7, -1]]
        found = collator.batch(rows, [0], document_starts).positions_BT
        assert found is not None
        assert found[0].tolist() == (expected or [0, 1, 2, 3, 4, 5, 6, 7, 0])
