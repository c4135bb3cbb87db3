"""Where a run writes: one folder, seen by all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from megahead.checkpoints import format as snapshots
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from megahead.train import session as shared_folder
from megahead.train.run import pretrain
from support.network_disk import NetworkDisk
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text


def ask(group: Group, folders: list[Path]) -> str:
    shared_folder.VISIBLE_SECONDS = 0.2
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


def test_a_new_run_is_saved_on_a_disk_whose_clients_remember_what_was_missing(tmp_path: Path) -> None:
    """The other node looks for its folders before rank 0 makes them."""
    write_text(tmp_path)

    def train(group: Group) -> str:
        if group.rank == 1:
            disk, save_file = NetworkDisk(tmp_path), snapshots.save_file
            assert not (tmp_path / "runs/new/checkpoints").exists()

            def save(tensors: dict[str, Tensor], file: Path) -> None:
                disk.require(file.parent)
                save_file(tensors, file)

            snapshots.save_file = save  # type: ignore[assignment]
        group.all_gather_objects(None)
        return pretrain(small_config(tmp_path, {"output_dir": str(tmp_path / "runs/new")})).ending

    assert on_ranks(2, train) == ["finished"] * 2


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_what_is_no_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    (sentence,) = on_ranks(1, ask, [tmp_path / below])
    assert sentence.startswith(f"output_dir must be a folder that can be written, but {tmp_path / below} cannot be")
