"""What a run went back from is not fetched again, also where its mirror still has it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from megahead.checkpoints import remote as abandonment
from megahead.checkpoints.fetch import fetch_named
from megahead.checkpoints.remote import FarRun
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from support.far_stores import Faulty, faults
from support.mirrored import fetched_step, finish, mirror, newer, save, steps_in_mirror, until


def went_back(url: str, tmp_path: Path) -> Path:
    """A run that went back from step 6 to 3 and saved step 4, while its mirror could be read, but not written."""
    run = tmp_path / "first"
    shutil.rmtree(run / "checkpoints/step-00000006")
    with faults("fails"), mirror(url.replace("file://", "faulty://"), run, tip=3) as sending:
        sending.offer(save(run, 4), 3)
    return run


def test_one_that_was_abandoned_in_the_mirror_alone_is_not_newer(url: str, tmp_path: Path) -> None:
    """A run went back to step 3 and saved, but nothing of that was sent."""
    run = tmp_path / "first"
    faulty = f"faulty://{tmp_path}/store"
    shutil.rmtree(run / "checkpoints/step-00000006")
    with mirror(faulty, run, tip=3) as sending:
        finish(sending)
        assert fetched_step(url, tmp_path / "first", than=3) == 6  # nothing is saved yet
        shutil.rmtree(run / "checkpoints/step-00000006")
        with faults("fails", "step-"):
            sending.offer(save(run, 4), 3)
            finish(sending)
    assert newer(url, run, than=4) is None
    assert fetched_step(url, tmp_path / "another") == 6
    with mirror(faulty, run, tip=4) as sending:
        sending.offer(save(run, 6, value=7.0), 4)
    assert fetched_step(url, run, than=4) == 6  # of the new history
    assert not RunFolder(run).abandoned_far.exists()  # none of it is there any more


def test_it_is_known_as_abandoned_also_where_nothing_at_all_could_be_written(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    assert newer(url, run, than=4) is None
    assert fetch_named(url, RunFolder(run)).name == "step-00000003"
    shutil.rmtree(run / "checkpoints")
    assert fetched_step(url, run) == 3
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(tmp_path / "store/checkpoints/step-00000003")
    with pytest.raises(CheckpointError, match=r"holds only what the run went back from \(checkpoints/step-00000006\)"):
        newer(url, run)
    with pytest.raises(CheckpointError, match=r"holds only what the run went back from \(checkpoints/step-00000006\)"):
        fetch_named(url, RunFolder(run))


def test_what_a_run_goes_on_from_after_all_is_not_abandoned(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    fetch_named(f"{url}/checkpoints/step-00000006", RunFolder(run))
    (run / "checkpoints/step-00000004").rename(run / "checkpoints/abandoned-step-00000004")
    with mirror(url, run, tip=6, keep=9) as sending:
        sending.offer(save(run, 8), 6)
    assert steps_in_mirror(url) == [3, 6, 8]


def test_it_is_known_from_the_first_save_on_though_that_waits_to_be_sent(url: str, tmp_path: Path) -> None:
    run = tmp_path / "first"
    shutil.rmtree(run / "checkpoints/step-00000006")
    shutil.rmtree(tmp_path / "store/checkpoints/step-00000003")
    with faults("waits", "step-00000003", times=1), mirror(f"faulty://{tmp_path}/store", run, tip=3) as sending:
        sending.offer_again(run / "checkpoints/step-00000003")
        until(lambda: Faulty.times == 0)
        sending.offer(save(run, 4), 3)
        assert newer(url, run, than=4) is None  # as after a kill
        Faulty.gate.set()
    assert steps_in_mirror(url) == [3, 4]
    assert not RunFolder(run).abandoned_far.exists()


def test_it_is_known_also_if_the_first_save_comes_while_the_mirror_is_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = tmp_path / "first", abandonment.hashes_above
    shutil.rmtree(run / "checkpoints/step-00000006")
    session = abandonment.Abandonment(FarRun(url), RunFolder(run), tip=3)

    def read_slowly(far: FarRun, step: int) -> set[str]:
        saving = threading.Thread(target=session.saved)
        saving.start()
        saving.join(20)
        return read(far, step)

    monkeypatch.setattr(abandonment, "hashes_above", read_slowly)
    session.look()
    assert newer(url, run, than=3) is None


def test_what_another_mirror_takes_does_not_make_it_forgotten(url: str, tmp_path: Path) -> None:
    run = went_back(url, tmp_path)
    (tmp_path / "store-2").mkdir()
    with mirror(f"file://{tmp_path}/store-2", run, tip=4) as sending:
        sending.offer_again(run / "checkpoints/step-00000004")
    assert newer(url, run, than=4) is None
