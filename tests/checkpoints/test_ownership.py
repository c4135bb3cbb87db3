"""A mirror is one run's, and at any time one session's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megahead.checkpoints.remote import RemoteLease, RemoteStorage, read_state
from megahead.checkpoints.transfer import Uploader
from megahead.errors import CheckpointError, UserError
from megahead.run_folder import RunFolder
from support.far_stores import Faulty, faults
from support.mirrored import Places, finish, mirror, save, steps_in_mirror, until
from support.named import folder_of


def test_a_mirror_is_one_runs(url: str, tmp_path: Path) -> None:
    other, fresh = RunFolder(tmp_path / "other"), RunFolder(tmp_path / "fresh")
    save(other.path, 2)
    sentence = rf"`training\.remote_checkpoints` must be this run's or empty, but {url} is that of another"
    for folder, resume in ((other, "auto"), (fresh, str(tmp_path / "first"))):
        with pytest.raises(CheckpointError, match=sentence):
            read_state(RemoteStorage.of(url), folder, resume)
    with pytest.raises(
        CheckpointError,
        match=r"`--resume never` needs a remote store without checkpoints, but .* has checkpoints/step-00000006-\w+;",
    ):
        read_state(RemoteStorage.of(url), fresh, "never")
    read_state(RemoteStorage.of(url), RunFolder(tmp_path / "first"), "auto")
    read_state(RemoteStorage.of(url), fresh, "auto")
    read_state(RemoteStorage.of(url), fresh, f"{url}/checkpoints/{folder_of(tmp_path / 'store', 3).name}")
    read_state(RemoteStorage.of(f"file://{tmp_path}/empty"), other, "auto")


def test_checkpoints_of_nobody_knows_whom_are_not_made_a_mirror(url: str, tmp_path: Path) -> None:
    """Their run would lose them: only the newest of this one's would be kept there. An empty disk may go on from them,
    which fetching refuses if they are another run's."""
    (tmp_path / "store/run-id").unlink()
    save(tmp_path / "other", 9)
    for folder, resume in (("other", "auto"), ("fresh", str(tmp_path / "first"))):
        with pytest.raises(
            CheckpointError, match=rf"this run's or empty, but {url} has checkpoints/step-00000006-\w+, and no run-id;"
        ):
            read_state(RemoteStorage.of(url), RunFolder(tmp_path / folder), resume)
    read_state(RemoteStorage.of(url), RunFolder(tmp_path / "fresh"), "auto")


def test_a_run_is_not_its_own_mirror(tmp_path: Path) -> None:
    """By whatever name: it would write over the files that it reads."""
    save(tmp_path / "run", 3)
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(
        CheckpointError,
        match=r"`training\.remote_checkpoints` must be another place than output_dir, but file://.*/link is",
    ):
        read_state(RemoteStorage.of(f"file://{tmp_path}/link"), RunFolder(tmp_path / "run"), "auto")
    assert not list((tmp_path / "run").glob(".tried-*"))


def only_the_later_goes_on(first: Uploader, second: Uploader) -> None:
    with pytest.raises(UserError, match="another has begun on node-b"):
        first.check()
    second.check()


def test_of_two_sessions_the_later_one_has_the_mirror(places: Places) -> None:
    run, url = places
    with mirror(url, run, "node-a, process 1\n") as first:
        finish(first)
        with mirror(url, run.with_name("run"), "node-b, process 2\n") as second:
            finish(second)
        first.enqueue(save(run, 3))
        finish(first)
        with pytest.raises(
            UserError, match=r"one session at a time, but with .* another has begun on node-b, process 2;"
        ):
            first.check()
        second.check()
    assert steps_in_mirror(url) == []


def test_a_session_that_is_followed_while_it_sends_names_nothing_and_removes_nothing(places: Places) -> None:
    run, url = places
    with mirror(url, run, "node-a\n", keep=1) as first:
        first.enqueue(save(run, 3))
        finish(first)
        with faults("waits", "tensors", times=1):
            first.enqueue(save(run, 6))
            until(lambda: Faulty.times == 0)
            with mirror(url, run, "node-b\n") as second:
                finish(second)
            Faulty.gate.set()
            finish(first)
        only_the_later_goes_on(first, second)
    assert steps_in_mirror(url) == [3]


def test_a_session_whose_beginning_failed_does_not_take_the_mirror_from_the_next(places: Places) -> None:
    run, url = places
    run.mkdir()
    RunFolder(run).config.write_text("name: small\n")
    with mirror(url, run, "node-a\n") as first:
        with faults("fails", "config.yaml", times=1):
            finish(first)
        with mirror(url, run, "node-b\n") as second:
            finish(second)
        first.enqueue(save(run, 3))
        finish(first)
        only_the_later_goes_on(first, second)


def test_nor_does_one_that_first_comes_to_it_when_the_next_one_has_sent(places: Places) -> None:
    """On another disk: what it has saved there is of the same history."""
    run, url = places
    with mirror(url, run) as sending:
        sending.enqueue(save(run, 3))
    other = Path(shutil.copytree(run, run.with_name("other")))
    with faults("fails", "/session"), mirror(url, run, "node-a\n") as first:
        finish(first)
        Faulty.fault = ""
        with mirror(url, other, "node-b\n") as second:
            second.enqueue(save(other, 6))
            finish(second)
            first.enqueue(save(run, 4))
            finish(first)
            only_the_later_goes_on(first, second)
    assert steps_in_mirror(url) == [3, 6]


def test_a_beginning_that_failed_is_tried_again(places: Places) -> None:
    run, url = places
    with faults("fails", "/session", times=1), mirror(url, run, "node-a\n") as sending:
        finish(sending)
        assert sending.events() == []
    assert (run.parent / "store/session").read_text() == "node-a\n"


def test_of_two_that_looked_at_the_same_time_the_first_to_come_has_the_mirror(places: Places) -> None:
    """Between the two a model is built."""
    run, url = places
    run.mkdir()
    remote, folder = RemoteStorage.of(url), RunFolder(run)
    first, second = (
        RemoteLease(remote.store, folder, mark, read_state(remote, folder, "auto")) for mark in ("a\n", "b\n")
    )
    for _ in range(2):
        first.acquire()
        with pytest.raises(UserError, match="another has begun on a;"):
            second.acquire()
    third = RemoteLease(remote.store, folder, "c\n", read_state(remote, folder, "auto"))
    third.acquire()
    with pytest.raises(UserError, match="another has begun on c;"):
        first.check()


def test_of_two_new_runs_that_share_a_mirror_one_ends(places: Places) -> None:
    """Both found it empty."""
    run, url = places
    remote, leases = RemoteStorage.of(url), []
    for name in ("one", "other"):
        folder = RunFolder(run.with_name(name))
        folder.path.mkdir()
        leases.append(RemoteLease(remote.store, folder, name, read_state(remote, folder, "auto")))
    leases[0].acquire()
    with pytest.raises(UserError, match="another has begun on one;"):
        leases[1].acquire()
    assert not RunFolder(run.with_name("other")).run_id.exists()


def test_what_has_become_another_runs_since_it_was_looked_at_is_not_taken(places: Places) -> None:
    run, url = places
    run.mkdir()
    remote, folder = RemoteStorage.of(url), RunFolder(run)
    lease = RemoteLease(remote.store, folder, "this\n", read_state(remote, folder, "auto"))
    (run.parent / "store/run-id").write_text("another\n")
    with pytest.raises(UserError, match=rf"must be this run's, but {url} has become that of another; choose"):
        lease.acquire()
    assert not folder.run_id.exists()


def test_a_mirror_that_became_another_runs_meanwhile_is_left_alone(places: Places) -> None:
    run, url = places
    run.mkdir()
    RunFolder(run).run_id.write_text("this one\n")
    (run.parent / "store/run-id").write_text("another\n")
    with mirror(url, run) as sending:
        finish(sending)
        with pytest.raises(UserError, match=rf"must be this run's, but {url} has become that of another; choose"):
            sending.check()
    assert [path.name for path in (run.parent / "store").glob("*")] == ["run-id"]


def test_an_empty_name_of_a_run_is_none(places: Places) -> None:
    """A full disk leaves such; nor is an empty session's."""
    run, url = places
    (there := run.parent / "store/run-id").touch()
    (there.parent / "session").touch()
    with mirror(url, run) as sending:
        finish(sending)
        sending.check()
        (there.parent / "session").write_bytes(b"")
        sending.enqueue(save(run, 3))
        finish(sending)
        sending.check()
    assert there.read_bytes() == RunFolder(run).run_id.read_bytes() != b""


def test_a_mirror_that_somebody_emptied_is_begun_again(places: Places) -> None:
    run, url = places
    store = run.parent / "store"
    run.mkdir()
    RunFolder(run).config.write_text("name: small\n")
    with mirror(url, run) as sending:
        sending.enqueue(save(run, 3))
        finish(sending)
        before = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
        shutil.rmtree(store)
        sending.enqueue(save(run, 6))
        finish(sending)
        sending.check()
    assert {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()} == before
    assert {"run-id", "session", "config.yaml"} <= set(before)
    read_state(RemoteStorage.of(url), RunFolder(run), "auto")


@pytest.mark.parametrize("fails", ["run-id", "/session", "config.yaml"])
def test_one_that_fails_while_it_is_begun_again_is_begun_whole_later(fails: str, places: Places) -> None:
    run, url = places
    run.mkdir()
    RunFolder(run).config.write_text("name: small\n")
    with mirror(url, run) as sending:
        finish(sending)
        shutil.rmtree(run.parent / "store")
        with faults("fails", fails):
            sending.enqueue(save(run, 6))
            finish(sending)
        sending.enqueue(save(run, 9))
    assert {"run-id", "session", "config.yaml"} <= {path.name for path in (run.parent / "store").iterdir()}


def test_a_session_that_another_has_followed_does_not_begin_an_emptied_one_again(places: Places) -> None:
    run, url = places
    with mirror(url, run, "node-a\n") as first:
        finish(first)
        with mirror(url, run, "node-b\n") as second:
            finish(second)
        first.enqueue(save(run, 3))
        finish(first)
        shutil.rmtree(run.parent / "store")
        first.enqueue(save(run, 6))
        finish(first)
    assert not (run.parent / "store").exists()


def test_nor_does_one_that_could_not_begin_it_again_in_time(places: Places) -> None:
    run, url = places
    with mirror(url, run, "node-a\n") as first:
        finish(first)
        shutil.rmtree(run.parent / "store")
        with faults("fails", "/session"):
            first.enqueue(save(run, 3))
            finish(first)
        with mirror(url, run, "node-b\n") as second:
            finish(second)
        first.enqueue(save(run, 6))
        finish(first)
        only_the_later_goes_on(first, second)
