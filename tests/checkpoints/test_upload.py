"""Copies in a store: a checkpoint counts there once it is whole, whatever the store does, and no step waits for it."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.remote import RemoteLease, RemoteState, RemoteStorage
from megahead.checkpoints.store import RetentionRules
from megahead.checkpoints.transfer import Uploader, fetch_checkpoint
from megahead.remote_files import Store
from megahead.run_folder import RunFolder
from support.far_stores import Faulty, faults
from support.mirrored import Places, finish, mirror, save, steps_in_mirror, until
from support.named import folder_of, folders_in, without_digits


def fields(sending: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in event.fields.items() if name != "seconds"} for event in sending.events()]


def test_the_mirror_is_a_run_folder_and_its_checkpoints_are_the_same(places: Places, tmp_path: Path) -> None:
    run, url = places
    (first := RunFolder(run)).path.mkdir()
    first.config.write_text("name: small\n")
    first.metrics.write_text('{"step": 1}\n')
    with mirror(url, run) as sending:
        sending.enqueue(folder := save(run, 3))
        finish(sending)
        assert fields(sending) == [{"step": 3, "bytes": sum(file.stat().st_size for file in folder.glob("*.safe*"))}]
    there = tmp_path / "store"
    assert open_checkpoint(there).step == 3
    open_checkpoint(there).verify()
    assert (there / "checkpoints/latest").read_text() == f"{folder.name}\n"
    assert (there / "config.yaml").read_text() == "name: small\n"
    assert (there / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (there / "run-id").read_bytes() == (run / "run-id").read_bytes()


def test_it_keeps_what_the_rules_keep(places: Places) -> None:
    run, url = places
    with mirror(url, run, keep=2, rules=RetentionRules(every=4)) as sending:
        for step in (2, 4, 5, 6, 7):
            sending.enqueue(save(run, step, keep=2))
            finish(sending)
    assert steps_in_mirror(url) == [4, 6, 7]
    folders = [without_digits(name) for name in folders_in(run.parent / "store/checkpoints")]
    assert folders == ["step-00000004", "step-00000006", "step-00000007"]


def test_a_history_that_was_orphaned_goes_when_the_new_one_counts(places: Places) -> None:
    run, url = places
    with mirror(url, run, keep=9) as sending:
        for step in (2, 4, 6):
            sending.enqueue(save(run, step))
            finish(sending)
        sending.enqueue(save(run, 4, value=-1, parent_step=2))
        finish(sending)
        assert steps_in_mirror(url) == [2, 4]
    assert open_checkpoint(fetch_to(url, run)).read("weight/w")[0] == -1


def fetch_to(url: str, beside: Path) -> Path:
    return fetch_checkpoint(url, RunFolder(beside.with_name("elsewhere")))


@pytest.mark.parametrize("fault", ["loses", "cuts", "fails"])
@pytest.mark.parametrize("only", ["tensors", "checkpoint.json"])
def test_what_did_not_arrive_has_no_name_and_one_sentence(fault: str, only: str, places: Places) -> None:
    """And the next checkpoint is copied as if nothing had been."""
    run, url = places
    with mirror(url, run) as sending:
        sending.enqueue(save(run, 3))
        finish(sending)
        sending.events()
        with faults(fault, only):
            sending.enqueue(lost := save(run, 6))
            finish(sending)
        (event,) = sending.events()
        assert event.fields["step"] == 6
        assert event.message is not None
        assert event.message.startswith(f"step 6 is not in the remote store, only in {lost}: `{url}")
        if (fault, only) != ("cuts", "checkpoint.json"):
            assert steps_in_mirror(url) == [3]
        assert open_checkpoint(fetch_to(url, run)).step == 3
        sending.enqueue(save(run, 9))
        finish(sending)
        assert steps_in_mirror(url) == [3, 9]
        assert not any("step-00000006" in name for name in RemoteStorage.of(url).store.sizes("checkpoints"))


def test_what_was_emptied_while_it_was_sent_is_sent_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    run, url = places
    send_files = RemoteStorage._send

    def send(*given: Any) -> None:
        send_files(*given)
        shutil.rmtree(run.parent / "store/checkpoints")
        monkeypatch.setattr(RemoteStorage, "_send", send_files)

    monkeypatch.setattr(RemoteStorage, "_send", send)
    with mirror(url, run) as sending:
        sending.enqueue(save(run, 6))
    open_checkpoint(run.parent / "store").verify()


def test_one_passed_over_that_was_there_before_the_session_is_no_news(places: Places) -> None:
    run, url = places
    save(run, 3)
    with faults("waits", "run-id", times=1), mirror(url, run) as sending:
        until(lambda: Faulty.times == 0)
        sending.enqueue(folder_of(run, 3), is_new=False)
        sending.enqueue(save(run, 4))
        assert sending.events() == []
        Faulty.gate.set()


def test_a_fault_that_passes_is_tried_again_and_not_told(places: Places) -> None:
    run, url = places
    with mirror(url, run) as sending:
        with faults("cuts", "tensors", times=2):
            sending.enqueue(save(run, 3))
            finish(sending)
        assert [event.message for event in sending.events()] == [None]
    assert steps_in_mirror(url) == [3]


def test_a_slow_store_makes_nobody_wait_and_the_newest_is_sent_next(places: Places) -> None:
    """What is on its way and what is next is not removed from the disk meanwhile."""
    run, url = places
    with mirror(url, run, keep=9) as sending:
        finish(sending)
        with faults("waits", "step-00000001", times=1):
            names = []
            for step in (1, 2, 3, 4):
                sending.enqueue(folder := save(run, step))
                names.append(folder.name)
                until(lambda: Faulty.times == 0)  # the first is on its way
            assert {names[0], names[3]} <= sending.in_use
            assert not {names[1], names[2]} & sending.in_use
            Faulty.gate.set()
            finish(sending)
        told = [event.fields["step"] for event in sending.events() if event.fields.get("skipped")]
    assert told[-2:] == [2, 3]
    assert steps_in_mirror(url) == [1, 4]
    assert sending.in_use == set()


def test_what_a_skipped_checkpoint_orphaned_is_orphaned_by_the_next(places: Places) -> None:
    run, url = places
    with mirror(url, run, keep=9) as sending:
        for step in (2, 5):  # one after the other: the older would be passed over
            sending.enqueue(save(run, step))
            finish(sending)
        with faults("fails"):
            for step, parent_step in ((3, 2), (6, 3)):
                sending.enqueue(save(run, step, parent_step=parent_step))
                finish(sending)
        sending.enqueue(save(run, 8, parent_step=6))
        finish(sending)
    assert steps_in_mirror(url) == [2, 8]


def test_a_checkpoint_that_is_there_sends_no_tensor_twice(places: Places) -> None:
    run, url = places
    with mirror(url, run) as sending:
        sending.enqueue(folder := save(run, 3))
        finish(sending)
        assert next(event.fields["bytes"] for event in sending.events()) > 2000
        sending.enqueue(folder)
        finish(sending)
        assert [event.fields["bytes"] for event in sending.events()] == [0]


def test_a_checkpoint_that_somebody_removed_meanwhile_is_no_news(places: Places) -> None:
    run, url = places
    with mirror(url, run) as sending:
        finish(sending)
        folder = save(run, 3)
        shutil.rmtree(folder)
        sending.enqueue(folder)
        finish(sending)
        assert sending.events() == []
    assert steps_in_mirror(url) == []


def test_one_that_is_on_its_way_stays_on_the_disk_though_it_was_saved_again(places: Places) -> None:
    run, url = places
    with mirror(url, run, keep=9) as sending, faults("waits", "tensors", times=1):
        sending.enqueue(first := save(run, 3))
        until(lambda: Faulty.times == 0)
        sending.enqueue(first)
        sending.enqueue(second := save(run, 6))
        assert sending.in_use == {first.name, second.name}
        Faulty.gate.set()
        finish(sending)
        assert [event.message for event in sending.events()] == [None, None]
    assert steps_in_mirror(url) == [3, 6]


def test_what_a_killed_session_took_back_goes_when_the_next_one_sends(places: Places) -> None:
    run, url = places
    with mirror(url, run, keep=9) as first:
        for step in (2, 4, 6):
            first.enqueue(save(run, step))
            finish(first)
    newest = save(run, 8, parent_step=4)
    with mirror(url, run, "the next session\n", keep=9) as second:
        second.enqueue(newest)
    assert steps_in_mirror(url) == [2, 4, 8]


def test_what_a_session_begins_with_takes_no_newer_ones_place(places: Places) -> None:
    """Not before its first save: it may be stopped, and the next one goes on from them."""
    run, url = places
    for step in (2, 4, 6):
        save(run, step)
    with mirror(url, run, keep=9) as first:
        first.enqueue(folder_of(run, 6))
    for again in (2, 4):
        with mirror(url, run, "the next session\n", keep=1) as second:
            second.enqueue(folder_of(run, again), is_new=False)
    assert steps_in_mirror(url) == [2, 4, 6]
    assert (run.parent / "store/checkpoints/latest").read_text().split()[0] == folder_of(run, 6).name


def test_nothing_goes_before_the_newest_is_latest(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of thousands of files takes minutes to be removed, in which the mirror would have none."""
    run, url = places
    acts, write = list[str](), Store.write
    monkeypatch.setattr(Store, "remove", removing(acts, Store.remove))

    def named(store: Store, name: str, content: bytes) -> None:
        if "checkpoints/" in name:
            acts.append(f"write {name}")
        write(store, name, content)

    monkeypatch.setattr(Store, "write", named)
    with mirror(url, run, keep=9) as sending:
        for step in (2, 4):
            sending.enqueue(save(run, step))
            finish(sending)
        acts.clear()
        sending.enqueue(newest := save(run, 3, parent_step=-1))
    assert acts[:2] == [f"write checkpoints/{newest.name}/checkpoint.json", "write checkpoints/latest"]
    assert len(acts) > 2
    assert {name.split("/")[1] for name in RemoteStorage.of(url).store.sizes("checkpoints")} == {"latest", newest.name}


def removing(removed: list[str], remove: Callable[[Store, str], None]) -> Callable[[Store, str], None]:
    def noted(store: Store, name: str) -> None:
        removed.append(name)
        remove(store, name)

    return noted


def test_what_is_done_again_is_sent_again_though_its_bits_are_the_same(places: Places) -> None:
    """The mirror's own may be why it is done again: it was damaged."""
    run, url = places
    with mirror(url, run) as first:
        first.enqueue(save(run, 3))
        finish(first)
        first.enqueue(save(run, 6))
    (file,) = folder_of(run.parent / "store", 6).glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    with mirror(url, run, "the next session\n") as second:
        second.enqueue(save(run, 6, parent_step=3))
    (again,) = folder_of(run.parent / "store", 6).glob("*.safetensors")
    assert again.read_bytes() == content


def test_a_log_that_did_not_arrive_is_told_as_such_and_the_checkpoint_is_there(places: Places) -> None:
    run, url = places
    run.mkdir()
    RunFolder(run).metrics.write_text('{"step": 1}\n')
    with mirror(url, run) as sending:
        finish(sending)
        with faults("fails", "metrics.jsonl"):
            sending.enqueue(save(run, 3))
            finish(sending)
        sent, log = sending.events()
    assert (sent.fields["step"], sent.message) == (3, None)
    assert "step" not in log.fields
    assert str(log.message).startswith(
        f"the run's log is not in the remote store: `{url}` must be reachable, but is not ("
    )
    assert steps_in_mirror(url) == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fails_is_told_and_a_thread_that_died_is_not_waited_for(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = places

    def fails(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    def dies(*_: object) -> int:
        raise SystemExit

    folder = save(run, 3)
    with mirror(url, run) as sending:
        finish(sending)
        with monkeypatch.context() as patches:
            patches.setattr(RemoteStorage, "put", fails)
            patches.setattr(Path, "is_dir", fails)
            sending.enqueue(folder)
            finish(sending)
        (event,) = sending.events()
        assert "Input/output error" in str(event.message)
        monkeypatch.setattr(RemoteStorage, "put", dies)
        sending.enqueue(folder)
        began = time.monotonic()
        finish(sending)
        assert time.monotonic() - began < 15


def test_nobody_waits_beyond_the_last_moment(places: Places) -> None:
    run, url = places
    run.mkdir()
    remote, folder = RemoteStorage.of(url), RunFolder(run)
    lease = RemoteLease(remote.store, folder, "this session\n", RemoteState())
    sending = Uploader(remote, folder, lease, RetentionRules())
    with faults("waits", "session"):
        assert list(sending.wait_until_done(time.monotonic() - 1)) == []
    sending.close()


def test_an_ending_is_there_only_after_one(places: Places, tmp_path: Path) -> None:
    run, url = places
    there = tmp_path / "store/ending.json"
    there.write_text("an earlier one")
    with mirror(url, run) as sending:
        finish(sending)
        assert not there.exists()
        RunFolder(run).session_end.write_text(json.dumps({"ending": "finished"}))
        sending.enqueue_files()
    assert json.loads(there.read_text()) == {"ending": "finished"}
