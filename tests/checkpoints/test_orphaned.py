"""What a run went back from is not fetched again, also where its mirror still has it."""

from __future__ import annotations

import shutil
from pathlib import Path

from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.transfer import fetch_checkpoint
from megahead.run_folder import RunFolder
from support.far_stores import Faulty, faults
from support.mirrored import fetched_step, finish, mirror, newer, save, steps_in_mirror, until
from support.named import folder_of


def went_back(url: str, tmp_path: Path) -> Path:
    """A run that went back from step 6 to 3 and saved step 4, while its mirror could be read, but not written."""
    run = tmp_path / "first"
    with faults("fails"), mirror(url.replace("file://", "faulty://"), run) as sending:
        sending.enqueue(save(run, 4, parent_step=3))
    shutil.rmtree(folder_of(run, 6))
    return run


def test_one_that_was_orphaned_in_the_mirror_alone_is_not_newer(url: str, tmp_path: Path) -> None:
    """A run went back to step 3 and saved, but nothing of that was sent."""
    run = tmp_path / "first"
    assert fetched_step(url, run, than=3) == 6  # nothing is saved yet
    went_back(url, tmp_path)
    assert newer(url, run, than=4) is None
    assert fetched_step(url, tmp_path / "another") == 6
    with mirror(url, run) as sending:
        sending.enqueue(save(run, 6, value=7.0))
    assert fetched_step(url, run, than=4) == 6  # of the new history
    assert open_checkpoint(run).read("weight/w")[0] == 7
    assert steps_in_mirror(url) == [3, 6]


def test_the_one_before_it_is_newer_than_what_is_sound_here(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    shutil.rmtree(folder_of(run, 3))
    assert fetched_step(url, run, than=-1) == 3  # step 4 is damaged


def test_nor_is_it_what_the_run_means_by_its_mirrors_address(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    assert fetch_checkpoint(url, RunFolder(run)).name == folder_of(run, 3).name
    assert open_checkpoint(fetch_checkpoint(f"{url}/checkpoints/step-00000006", RunFolder(run))).step == 6


def test_what_a_run_goes_on_from_after_all_is_not_orphaned(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    fetched = fetch_checkpoint(f"{url}/checkpoints/step-00000006", RunFolder(run))
    (run / "checkpoints/latest").write_text(fetched.name)
    with mirror(url, run, keep=9) as sending:
        sending.enqueue(save(run, 8, parent_step=6))
    assert steps_in_mirror(url) == [3, 6, 8]
    assert open_checkpoint(tmp_path / "store").step == 8


def test_it_is_known_from_the_first_save_on_though_that_waits_to_be_sent(url: str, tmp_path: Path) -> None:
    run = tmp_path / "first"
    third = folder_of(run, 3)
    shutil.rmtree(tmp_path / "store/checkpoints" / third.name)
    with faults("waits", "step-00000003", times=1), mirror(f"faulty://{tmp_path}/store", run) as sending:
        sending.enqueue(third, is_new=False)
        until(lambda: Faulty.times == 0)
        sending.enqueue(save(run, 4, parent_step=3))
        assert newer(url, run, than=4) is None  # as after a kill
        Faulty.gate.set()
    assert steps_in_mirror(url) == [3, 4]


def test_what_another_mirror_takes_does_not_make_it_forgotten(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    (tmp_path / "store-2").mkdir()
    with mirror(f"file://{tmp_path}/store-2", run) as sending:
        sending.enqueue(folder_of(run, 4), is_new=False)
    assert newer(url, run, than=4) is None
    with mirror(f"file://{tmp_path}/store-2", run) as sending:
        sending.enqueue(save(run, 5))
        finish(sending)
    assert newer(url, run, than=5) is None
