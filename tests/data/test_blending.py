"""Several datasets in proportion, at every prefix and from anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megahead.config.data import DataConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import (
    PERIOD,
    Blend,
    build_schedule,
    describe_samples,
    relative_epochs,
    round_shares,
    temperature_weights,
    token_counts,
    training_samples,
)
from megahead.data.samples import ConcatenatedSamples
from megahead.data.writer import IndexedDatasetWriter


def shares(weights: list[float]) -> np.ndarray:
    return np.array(weights) / sum(weights)


@pytest.fixture
def datasets(tmp_path: Path) -> list[IndexedDataset]:
    """Three datasets whose tokens tell which one it is and where."""
    for number, size in enumerate((1000, 400, 3000)):
        with IndexedDatasetWriter(tmp_path / f"part{number}", vocab_size=60_000) as writer:
            writer.add_document(np.arange(size) + 10_000 * number)
    return [IndexedDataset(tmp_path / f"part{number}") for number in range(3)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40), st.sampled_from([64, 1000, 4099]))
def test_each_stands_within_one_sample_of_its_share_at_every_prefix(weights: list[float], period: int) -> None:
    quotas = round_shares(shares(weights), period)
    assert quotas.sum() == period
    assert quotas.min() >= 1
    part_P, ordinal_P = build_schedule(quotas)
    counts = np.cumsum(part_P[:, None] == np.arange(len(weights)), axis=0)
    fair = np.arange(1, period + 1)[:, None] * (quotas / period)
    assert np.abs(counts - fair).max() < 1
    assert counts[-1].tolist() == quotas.tolist()
    assert (counts[np.arange(period), part_P] - 1 == ordinal_P).all()  # each dataset's own, one after the other


def test_shares_are_rounded_to_the_nearest_samples() -> None:
    assert round_shares(shares([1, 1, 1]), 64).tolist() == [22, 21, 21]
    assert round_shares(shares([1e-9, 1]), PERIOD).tolist() == [1, PERIOD - 1]
    rounded = round_shares(shares([0.6053, 0.1, 0.2947]), PERIOD)
    assert np.abs(rounded - np.array([0.6053, 0.1, 0.2947]) * PERIOD).max() < 1


def test_samples_come_from_their_datasets_in_order_and_from_anywhere(datasets: list[IndexedDataset]) -> None:
    parts = [ConcatenatedSamples(dataset, 10, seed) for seed, dataset in enumerate(datasets)]
    blend = Blend(parts, [2.0, 1.0, 5.0])
    indices = np.arange(PERIOD - 100, PERIOD + 300)  # over the border of a period
    rows = blend.read(indices)[0]
    part_B, own_B = blend.locate(indices)
    assert (rows[:, 0] // 10_000 == part_B).all()
    for part in range(3):
        own = own_B[part_B == part]
        assert np.array_equal(own, np.arange(own[0], own[0] + len(own)))
        assert np.array_equal(rows[part_B == part], parts[part].read(own)[0])
    shuffled = np.random.default_rng(0).permutation(len(indices))
    assert np.array_equal(blend.read(indices[shuffled])[0], rows[shuffled])
    with pytest.raises(IndexError):
        blend.read([-1])


def test_ratios_and_repetition_are_said(datasets: list[IndexedDataset]) -> None:
    blend = Blend([ConcatenatedSamples(dataset, 10, 0) for dataset in datasets], [1, 1, 2])
    first, second, third = blend.describe(200)
    shares = "requested 25.0000%, rounded 25.0000%, achieved 25.0000%"
    assert first == f"{datasets[0].prefix}: {shares}, 0.51 epochs"  # 50 of its 99 rows
    assert second == f"{datasets[1].prefix}: {shares}, REPEATED: 1.28 epochs"  # its 39 rows
    assert "REPEATED" not in third
    assert describe_samples(blend, 200) == [("blend", line) for line in (first, second, third)]
    assert relative_epochs(blend) == pytest.approx([39 / 99, 1.0, 2 * 39 / 299])


def test_ids_are_counted_as_often_as_their_text_is_read(tmp_path: Path) -> None:
    for number, size in enumerate((990, 390)):
        with IndexedDatasetWriter(tmp_path / f"part{number}", vocab_size=4) as writer:
            writer.add_document(np.full(size, number + 1))
    datasets = [IndexedDataset(tmp_path / f"part{number}") for number in range(2)]
    blend = Blend([ConcatenatedSamples(dataset, 10, 0) for dataset in datasets], [1, 1])
    first = math.ceil(990 * relative_epochs(blend)[0])
    assert 300 < first < 500
    assert token_counts(datasets, blend, 6).tolist() == [0, first, 390, 0, 0, 0]
    (tmp_path / "part1.json").unlink()  # it has not counted
    assert token_counts([datasets[0], IndexedDataset(tmp_path / "part1")], blend, 6).tolist() == [0, first, 0, 0, 0, 0]


def test_counts_of_billions_keep_all_digits(datasets: list[IndexedDataset], monkeypatch: pytest.MonkeyPatch) -> None:
    info, many = datasets[0].info, 3 * 2**30 + 1
    assert info is not None
    monkeypatch.setattr(datasets[0], "info", replace(info, token_counts=[many, 0, 1]))
    assert token_counts(datasets[:1], ConcatenatedSamples(datasets[0], 10, 0), 4).tolist() == [many, 0, 1, 0]


def test_temperature_lifts_the_small_ones() -> None:
    assert temperature_weights([1.0, 3.0], 1.0).tolist() == [0.25, 0.75]
    assert temperature_weights([1.0, 16.0], 2.0) == pytest.approx([0.2, 0.8])
    assert temperature_weights([1.0, 1e30], 1e9) == pytest.approx([0.5, 0.5])


def test_a_config_asks_for_a_blend(datasets: list[IndexedDataset]) -> None:
    def samples(**settings: object) -> Blend:
        parts = [{"prefix": str(dataset.prefix)} for dataset in datasets]
        data = DataConfig.model_validate({"train": parts, "sequence_length": 10, **settings})
        built = training_samples(data, datasets, 7, data.sequence_length)
        assert isinstance(built, Blend)
        return built

    assert samples().requested_shares == pytest.approx([1000 / 4400, 400 / 4400, 3000 / 4400])  # by tokens
    assert samples(blend_temperature=1e6).requested_shares == pytest.approx([1 / 3] * 3, rel=1e-3)
    assert np.array_equal(samples().read(range(50))[0], samples().read(range(50))[0])
    assert len({part.seed for part in samples().parts}) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["shuffled", "stored"])
def test_one_prefix_is_no_blend(flat_dataset: Callable[[int], Path], order: str) -> None:
    dataset = IndexedDataset(flat_dataset(7))
    data = DataConfig.model_validate({"train": "x", "sequence_length": 6 if order == "stored" else 3, "order": order})
    samples = training_samples(data, [dataset], 3, data.sequence_length)
    assert not isinstance(samples, Blend)
    assert samples.read([0])[0].shape[1] == data.sequence_length + 1
    assert relative_epochs(samples) == [1.0]
