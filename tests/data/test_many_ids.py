"""Ids beyond 65,535 come through every room from text to batches: written, read, merged, inspected, cut into rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megahead.config.loading import config_from_dict
from megahead.data.batch import CausalCollator
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import inspect_dataset, merge_datasets
from megahead.data.loader import BatchReader, token_counts, training_samples
from megahead.data.preprocess import preprocess
from megahead.data.train_tokenizer import save_tokenizer
from support.good_settings import GOOD


@pytest.fixture(params=[70_000, 1_000_000])
def text(
    request: pytest.FixtureRequest, tmp_path: Path, json_lines: Callable[..., Path]
) -> tuple[Path, list[int], int]:
    """A dataset of words whose ids are spread over so many, the ids it was made of, and how many there are."""
    size = int(request.param)
    words = {"<|endoftext|>": 0} | {f"w{number}": size - 1 - 300 * number for number in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(tokenizer, tmp_path / "t.json")
    chosen = np.random.default_rng(0).integers(0, 200, 4 * 100).reshape(4, 100)
    texts = [" ".join(f"w{number}" for number in row) for row in chosen]
    for part in range(2):
        file = json_lines(texts[2 * part : 2 * part + 2], name=f"part{part}.jsonl")
        preprocess([file], tmp_path / "t.json", tmp_path / f"part{part}")
    merge_datasets([tmp_path / "part0", tmp_path / "part1"], tmp_path / "all")
    return tmp_path / "all", [id_ for row in chosen for id_ in [*(size - 1 - 300 * row), 0]], size


def test_ids_are_the_same_in_every_room(text: tuple[Path, list[int], int]) -> None:
    prefix, ids, size = text
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == np.int32
    assert dataset.read(0, len(ids)).tolist() == ids
    inspection = inspect_dataset(prefix)
    assert inspection.verified
    assert inspection.used_ids.tolist() == sorted({*ids})
    assert inspection.counts[size - 1] == ids.count(size - 1)
    data = {**GOOD["data"], "train": str(prefix), "sequence_length": 16}
    tree = {**GOOD, "data": data, "model": {**GOOD["model"], "vocab_size": size}}
    config = config_from_dict(tree)
    samples = training_samples(config.data, [dataset], seed=0, length=16)
    batch = BatchReader(samples, CausalCollator(config.data)).read(range(samples.rows_per_epoch))
    places = {tuple(ids[at : at + 16]) for at in range(len(ids))}
    assert {tuple(row) for row in batch.input_ids_BT.tolist()} <= places
    assert token_counts([dataset], samples, config.model.padded_vocab_size())[size - 1] == ids.count(size - 1)
