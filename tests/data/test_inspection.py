"""What an inspection counts, and the damage it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megahead.data.inspection import inspect_dataset
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import save_tokenizer, train_wordpiece
from megahead.errors import DataError


def test_counts_with_and_without_a_description(write_dataset: Callable[..., Path]) -> None:
    prefix = write_dataset([[5, 7, 0], [5, 0]])
    noted = inspect_dataset(prefix)
    Path(f"{prefix}.json").unlink()
    counted = inspect_dataset(prefix)
    for inspection in (noted, counted):
        assert inspection.used_ids.tolist() == [0, 5, 7]
        assert inspection.counts[[0, 5, 7]].tolist() == [2, 2, 1]
        assert dict(inspection.facts(end_token=0))["end tokens"] == "40.0000% of the tokens (id 0)"
    assert (noted.verified, counted.verified) == (True, False)
    facts = dict(noted.facts(end_token=0))
    assert facts["tokens"] == "5 (uint16)"
    assert facts["ids used"] == "3, from 0 to 7"
    assert facts["lengths"].startswith("2 to 3, mean 2.5")


def test_an_empty_dataset_can_be_looked_at(write_dataset: Callable[..., Path]) -> None:
    facts = dict(inspect_dataset(write_dataset([])).facts(end_token=0))
    assert (facts["sequences"], facts["lengths"], facts["ids used"]) == ("0", "none", "none")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_flipped_bit_is_found(write_dataset: Callable[..., Path], ending: str) -> None:
    prefix = write_dataset([[5, 7, 0], [5, 0]])
    path = Path(f"{prefix}{ending}")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"data\{ending}` must have the SHA-256"):
        inspect_dataset(prefix)
    assert not inspect_dataset(prefix, verify=False).verified


def test_gaps_between_sequences_are_found_without_checksums(write_dataset: Callable[..., Path]) -> None:
    prefix = write_dataset([[1, 2], [3, 4], [5, 6]])
    Path(f"{prefix}.json").unlink()
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    data[34 + 12 + 8] = 2  # the second sequence begins inside the first
    path.write_bytes(data)
    with pytest.raises(DataError, match="sequence 1 does not"):
        inspect_dataset(prefix)


def test_the_histogram_doubles_its_ranges(write_dataset: Callable[..., Path]) -> None:
    lengths = [0, 1, 1, 2, 3, 3, 16, 31]
    inspection = inspect_dataset(write_dataset([[1] * length for length in lengths]))
    assert inspection.histogram() == [
        ("0", 1), ("1", 2), ("2 to 3", 3), ("4 to 7", 0), ("8 to 15", 0), ("16 to 31", 2),
    ]  # fmt: skip
    none = inspect_dataset(write_dataset([], name="none"))
    assert none.histogram() == []
    assert none.warnings(end_token=0) == ["there is no token: it cannot be trained on, and a merge leaves it out."]


def test_what_would_spoil_training_is_said(write_dataset: Callable[..., Path], tmp_path: Path) -> None:
    fine = inspect_dataset(write_dataset([[5, 0]], name="fine"))
    assert fine.warnings(end_token=0) == []
    ended = inspect_dataset(write_dataset([[5, 0], []], name="ended"))
    assert ended.warnings(end_token=0) == ["1 sequence without a token."]
    poor = inspect_dataset(write_dataset([[5, 9], []], name="poor"))
    save_tokenizer(train_wordpiece(["a b c d"], 13), tmp_path / "nine.json")
    never, beyond, empty = poor.warnings(end_token=0, tokenizer=load_tokenizer(tmp_path / "nine.json"))
    assert never.startswith("the end token 0 never occurs")
    assert beyond.startswith("id 9 occurs, but the tokenizer ends at 8")
    assert empty == "1 sequence without a token."
