"""Where a run writes: one folder, seen by all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from megahead.train import session as shared_folder
from support.on_ranks import on_ranks


def ask(group: Group, folders: list[Path]) -> str:
    shared_folder.TIMEOUT_SECONDS = 0.2
    try:
        shared_folder.require_shared_folder(RunFolder(folders[group.rank]), group)
    except CheckpointError as error:
        return str(error)
    return "shared"


def test_a_folder_that_all_see_is_left_as_it_was(tmp_path: Path) -> None:
    assert on_ranks(2, ask, [tmp_path / "a/run"] * 2) == ["shared"] * 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    assert on_ranks(2, ask, [tmp_path / "there"] * 2) == ["shared"] * 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_folder_on_each_node_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    sentence, other = on_ranks(2, ask, [tmp_path / "node-0/run", tmp_path / "node-1/run"])
    assert sentence == other
    assert sentence == (
        f"output_dir must be one folder for all ranks, but rank 1 does not see in {tmp_path}/node-1/run what rank 0 "
        "wrote there; put it on a file system that all nodes share."
    )


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_what_is_no_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    (sentence,) = on_ranks(1, ask, [tmp_path / below])
    assert sentence.startswith(f"output_dir must be a folder that can be written, but {tmp_path / below} cannot be")
