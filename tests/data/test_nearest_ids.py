"""The file of nearest ids: the largest cosines, written and read again; masking with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megahead.config.masking import MaskingConfig
from megahead.data.framing import Framing
from megahead.data.loader import find_nearest_ids, open_nearest_ids, save_nearest_ids
from megahead.data.masking import Masker
from megahead.data.strategies import Uniform
from megahead.errors import ConfigError, DataError

CLS, SEP, MASK, VOCABULARY = 1, 2, 3, 40


def test_they_are_the_rows_of_the_largest_cosines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((300, 7)) * np.logspace(0, 2, 300)[:, None]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T - 9 * np.eye(300)
    found = find_nearest_ids(rows, 5)
    assert (found == np.argsort(-cosines, axis=1)[:, :5]).all()
    save_nearest_ids(tmp_path / "folder" / "ids.npy", found)
    assert (open_nearest_ids(str(tmp_path / "folder" / "ids.npy"), 300) == found).all()
    assert open_nearest_ids(str(tmp_path / "folder" / "ids.npy"), 302).shape == (302, 5)  # ids behind the tokenizer's
    with pytest.raises(DataError, match="more than 300 ids"):
        find_nearest_ids(rows, 300)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (np.zeros(4, np.int32), "hold a table of ids"),
        (np.zeros((4, 2)), "hold a table of ids"),
        (np.array([[1], [4], [0]]), "be of at most model.vocab_size"),
        (np.array([[0], [1], [2]]), "name other ids"),
        (np.array([[1, 1], [0, 2], [0, 1]]), "name other ids, each once"),
    ],
    ids=str,
)
def test_another_file_is_refused(tmp_path: Path, table: np.ndarray, rule: str) -> None:
    np.save(tmp_path / "ids.npy", table)
    with pytest.raises(ConfigError, match=f"`data.nearest_ids` must {rule}"):
        open_nearest_ids(str(tmp_path / "ids.npy"), 4)
    with pytest.raises(ConfigError, match=r"must name a file of megahead nearest-ids, but is .*nowhere"):
        open_nearest_ids(str(tmp_path / "nowhere"), 4)


def test_a_file_of_fewer_nearest_ids_than_are_wanted_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ids.npy")
    np.save(path, np.array([[1, 2], [0, 2], [0, 1]]))
    assert open_nearest_ids(path, 3, 2).shape == (3, 2)
    with pytest.raises(ConfigError, match=r"^`objective\.nearest` must be at most the number of .* \(2\), but is 3 .*"):
        open_nearest_ids(path, 3, 3)


def test_a_share_of_the_targets_is_read_as_similar_tokens_and_never_as_a_special_one() -> None:
    """Ids from 20 on have two ordinary nearest ids; those below one, and a special token."""
    ids = np.arange(VOCABULARY)
    other = np.where(ids % 2 == 0, ids + 1, ids - 1)
    nearest = np.stack([other, np.where(ids < 20, SEP, (ids + 2 - 20) % 20 + 20)], axis=1)
    settings = {"mask_share": 0.1, "random_share": 0.1, "similar_share": 0.6, "rate": 0.5}
    config = MaskingConfig(mask_token=MASK, cls_token=CLS, sep_token=SEP, **settings)
    masker = Masker(Framing(config, SEP, False), Uniform(), VOCABULARY, 7, nearest_VK=nearest)
    text = np.random.default_rng(0).integers(4, VOCABULARY, (400, 126))
    batch = masker.batch(text, range(400))
    read = batch.input_ids_BT.numpy().reshape(-1)[batch.target_index_N.numpy()]
    target = batch.target_ids_N.numpy()
    similar = (read[:, None] == nearest[target]).any(1)
    assert not np.isin(read, [CLS, SEP]).any()
    high = target >= 20
    assert (similar & high).sum() / high.sum() == pytest.approx(0.6 + 0.1 * 2 / 36, abs=0.02)
    assert (similar & ~high).sum() / (~high).sum() == pytest.approx(0.3 + 0.1 / 36, abs=0.02)
    assert (read == MASK).mean() == pytest.approx(0.1, abs=0.01)
    again = masker.batch(text[5:6], [5])
    assert (again.input_ids_BT[0] == batch.input_ids_BT[5]).all()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"text"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ids.npy").write_bytes(content)
    with pytest.raises(ConfigError, match="must name a file of megahead nearest-ids"):
        open_nearest_ids(str(tmp_path / "ids.npy"), 4)
    np.savez(tmp_path / "several.npz", one=np.zeros((4, 1), np.int32))
    with pytest.raises(ConfigError, match="which has several arrays"):
        open_nearest_ids(str(tmp_path / "several.npz"), 4)
