"""Where things lie in a run's folder, and which run a checkpoint is of."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from megahead.run_folder import RunFolder


def test_a_run_is_found_from_its_folder_its_checkpoints_and_each_of_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for name in ("step-00000003", "step-00000003.replaced", "abandoned-step-00000003"):
        assert RunFolder.of(run.checkpoints / name) == run
    assert RunFolder.of(run.checkpoints) == RunFolder.of(run.path) == run


def test_a_run_is_found_through_links_to_a_checkpoint_and_to_another_disk(tmp_path: Path) -> None:
    run, disk = RunFolder(tmp_path / "run"), tmp_path / "disk"
    (disk / "step-00000003").mkdir(parents=True)
    run.path.mkdir()
    run.checkpoints.symlink_to(disk)
    assert RunFolder.of(run.checkpoints / "step-00000003") == run
    other = RunFolder(tmp_path / "other")
    (other.checkpoints / "step-00000003").mkdir(parents=True)
    (tmp_path / "best").symlink_to(other.checkpoints / "step-00000003")
    assert RunFolder.of(tmp_path / "best") == other


def test_a_run_is_found_from_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    monkeypatch.chdir(checkpoint)
    assert RunFolder.of(Path()) == RunFolder(tmp_path / "run")


def test_a_checkpoint_taken_out_of_its_run_is_a_run_by_itself(tmp_path: Path) -> None:
    """And nothing is written beside the folder that it lies in."""
    assert RunFolder.of(tmp_path / "step-00000003").exports == tmp_path / "step-00000003/exports"


def test_it_stands_where_a_path_is_asked_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert Path(run) == run.path == tmp_path / os.fspath(run)
    assert f"{run}" == str(tmp_path / "run")
    assert run / "wandb" == tmp_path / "run/wandb"


def test_the_class_can_be_inspected() -> None:
    """By `help`, completion in notebooks, and mocks."""
    assert {"metrics", "checkpoints", "tokenizer"} <= dict(inspect.getmembers(RunFolder)).keys()


def test_a_run_in_a_folder_that_is_called_checkpoints_is_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "checkpoints/first")
    assert RunFolder.of(run.path) == RunFolder.of(run.checkpoints / "1000") == run
    for folder in (tmp_path / "checkpoints/12345", tmp_path / "checkpoints"):  # by the id of a job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch()
        assert RunFolder.of(folder) == RunFolder(folder)
