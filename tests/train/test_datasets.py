"""The text of a run is opened by all ranks or by none, and rows are packed by one of them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megahead.data import loader as sampling
from megahead.data import samples as packing
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.errors import UserError
from megahead.train.datasets import open_datasets
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

PACKED = {"data.pack": "best_fit"}


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def opened(group: Group, folder: Path, changes: dict[str, Any]) -> tuple[int, int]:
    """(rows, how often this rank packed them)."""
    fcntl.flock = no_locks  # type: ignore[assignment]
    made, pack = 0, packing.best_fit_rows

    def counted(*arguments: Any) -> packing.PackTable:
        nonlocal made
        made += 1
        return pack(*arguments)

    packing.best_fit_rows = counted
    rows = open_datasets(small_config(folder, changes), group).samples.read([0, 1])[0]
    return int(rows.sum()), made


def test_one_rank_packs_and_all_read_the_same_rows(tmp_path: Path) -> None:
    write_text(tmp_path)
    sums, made = zip(*on_ranks(4, opened, tmp_path, PACKED), strict=True)
    assert made == (1, 0, 0, 0)
    assert len(set(sums)) == 1
    assert len(list(tmp_path.glob("text.pack-*"))) == 1


def sentence(group: Group, folder: Path, broken: int) -> str:
    if group.rank == broken:
        sampling.pack_table = refuse  # type: ignore[assignment]
    with pytest.raises(UserError) as caught:
        open_datasets(small_config(folder, PACKED), group)
    return str(caught.value)


def refuse(*_: Any) -> None:
    raise UserError("the disk must have room, but has not.")


@pytest.mark.parametrize("broken", [0, 2])
def test_all_ranks_end_with_the_sentence_of_the_one_that_cannot(tmp_path: Path, broken: int) -> None:
    write_text(tmp_path)
    assert on_ranks(3, sentence, tmp_path, broken, timeout=30) == ["the disk must have room, but has not."] * 3


def test_a_run_whose_documents_are_closed_by_another_id_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    with pytest.raises(
        UserError, match=r"`data\.end_token` must be the id that closes the documents of .*text, but is 1"
    ):
        open_datasets(small_config(tmp_path, {"data.end_token": 1}))
    assert open_datasets(small_config(tmp_path, {"data.end_token": 1, "data.isolate_documents": False}))
    without_held_out = {"data.end_token": 1, "data.validation": None}
    assert open_datasets(small_config(tmp_path, {**PACKED, **without_held_out}))


def test_rows_in_which_nothing_is_kept_apart_are_reported(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=60) as writer:
        writer.add_documents(np.full(250, 7), np.full(10, 25), sequences=np.empty(0, np.int64))
    config = small_config(tmp_path, {"data.order": "stored"})
    told = dict(open_datasets(config).describe(config))
    assert told["documents"] == f"{tmp_path}/text: not kept apart, no row that was checked has an end token (0)"
    plain = small_config(tmp_path, {"data.order": "stored", "data.isolate_documents": False})
    assert "documents" not in dict(open_datasets(plain).describe(plain))


def test_held_out_text_is_checked_with_the_text_that_is_trained_on(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"data.validation": str(tmp_path / "held-out"), "data.sequence_length": 24})
    with IndexedDatasetWriter(tmp_path / "held-out", vocab_size=60) as writer:
        writer.add_document([*range(1, 24), 0])
    with pytest.raises(UserError, match=r"held-out` must hold at least 25 tokens .*, but holds 24 instead"):
        open_datasets(config)
    with IndexedDatasetWriter(tmp_path / "held-out", vocab_size=60) as writer:
        writer.add_documents(np.full(280, 7), np.full(10, 28), sequences=np.empty(0, np.int64))
    with pytest.raises(UserError, match=r"sequences of 25 tokens .* has 28; change data\.sequence_length by \+3\."):
        open_datasets(config)
