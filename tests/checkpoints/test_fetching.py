"""Checkpoints from a store: the newest valid one, verified before it has a name here."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead import remote_files
from megahead.checkpoints import transfer as downloading
from megahead.checkpoints.format import Manifest
from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.checkpoints.remote import RemoteStorage, read_state
from megahead.checkpoints.transfer import fetch_checkpoint, fetch_newer
from megahead.commands import checkpoint_path
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.remote_files import RemoteError
from megahead.run_folder import RunFolder
from support.far_stores import Faulty
from support.mirrored import fetched_step, finish, mirror, newer, save, steps_in_mirror
from support.named import folder_of, folders_in, without_digits
from support.on_ranks import on_ranks
from support.saved import save_checkpoint


def stored(tmp_path: Path, step: int) -> Path:
    (file,) = folder_of(tmp_path / "store", step).glob("*.safetensors")
    return file


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def fetched_on(group: Group, url: str, folder: Path) -> tuple[int, list[str]]:
    found = newer(url, folder, group=group)
    assert found is not None
    assert found.checkpoint is not None
    return found.checkpoint.step, found.problems


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_empty_disk_gets_the_newest(ranks: int, url: str, tmp_path: Path) -> None:
    assert on_ranks(ranks, fetched_on, url, tmp_path / "new") == [(6, [])] * ranks
    name = folder_of(tmp_path / "store", 6).name
    assert [path.name for path in (tmp_path / "new/checkpoints").iterdir() if path.is_dir()] == [name]
    assert (tmp_path / "new/checkpoints/latest").read_text().split()[0] == name


def save_together(group: Group, root: Path) -> Path:
    tensors = {f"weight/{i}": torch.full((50,), float(i)) for i in range(4)}
    return save_checkpoint(root, 1, tensors.items(), state={"step": 1}, config={}, group=group)


def test_a_line_says_how_much_of_all_files_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many files a checkpoint has, and however quickly each comes."""
    saved = on_ranks(2, save_together, tmp_path / "run/checkpoints")[0]
    sizes = [entry.bytes for entry in Manifest.read(saved).files.values()]
    monkeypatch.setattr(remote_files, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(remote_files, "format_gib", str)
    fetch_checkpoint(f"file://{tmp_path}/run", RunFolder(tmp_path / "new"))
    begin, total = f"fetching file://{tmp_path}/run/checkpoints/{saved.name}:", sum(sizes)
    assert capsys.readouterr().out.splitlines() == [f"{begin} {so_far} of {total}" for so_far in (sizes[0], total)]


def test_nothing_that_is_not_newer_is_fetched(url: str, tmp_path: Path) -> None:
    assert newer(url, tmp_path / "new", than=6) is None
    assert not (tmp_path / "new").exists()


def test_one_that_this_disk_has_orphaned_is_not_newer(url: str, tmp_path: Path) -> None:
    save(tmp_path / "first", 4, parent_step=3)
    assert newer(url, tmp_path / "first", than=4) is None


def test_one_that_is_removed_while_it_is_fetched_makes_way_for_a_newer_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session before still sends."""
    fetch_files = downloading._fetch_files
    with mirror(url, tmp_path / "first", keep=1) as sending:

        def fetch(remote: RemoteStorage, name: str, *others: Any) -> Iterator[None]:
            if without_digits(name).endswith("6"):
                sending.enqueue(save(tmp_path / "first", 8))
                finish(sending)
            yield from fetch_files(remote, name, *others)

        monkeypatch.setattr(downloading, "_fetch_files", fetch)
        assert fetched_step(url, tmp_path / "new") == 8
    assert steps_in_mirror(url) == [8]


def test_no_more_is_read_than_the_first_that_may_be_used(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = RemoteStorage.manifest_with_bytes, []
    monkeypatch.setattr(
        RemoteStorage, "manifest_with_bytes", lambda remote, name: names.append(name) or read(remote, name)
    )
    assert without_digits(fetch_checkpoint(url, RunFolder(tmp_path / "first")).name) == "step-00000006"
    assert set(names) == {folder_of(tmp_path / "store", 6).name}


def test_the_log_stays_where_nothing_sound_is_fetched(url: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "first")
    shutil.rmtree(folder_of(run.path, 6))
    (tmp_path / "store/metrics.jsonl").write_text("older\n")
    run.metrics.write_text("newer\n")
    flip(stored(tmp_path, 6))
    assert fetched_step(url, run.path, than=3) is None
    assert run.metrics.read_text() == "newer\n"


def test_a_log_that_cannot_be_read_is_told_before_a_long_fetch(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RemoteError("down")

    fetched: list[str] = []
    monkeypatch.setattr(downloading, "read_small_files", broken)
    monkeypatch.setattr(downloading, "_fetch_files", lambda remote, name, *others: fetched.append(name))
    with pytest.raises(CheckpointError, match="down"):
        newer(url, tmp_path / "new")
    assert fetched == []


def test_a_log_that_takes_longer_than_a_small_request_is_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Faulty.cat_file

    def slow(files: Faulty, path: str, *arguments: object, **named: object) -> bytes:
        time.sleep(0.6 * path.endswith("metrics.jsonl"))
        return bytes(read(files, path, *arguments, **named))

    (tmp_path / "store/metrics.jsonl").write_text("a line\n")
    monkeypatch.setattr(Faulty, "cat_file", slow)
    group, far = Group(timeout_seconds=2.4), url.replace("file:", "faulty:")  # a small request: 0.3 s
    assert newer(far, tmp_path / "new", group=group) is not None
    assert (tmp_path / "new/metrics.jsonl").read_text() == "a line\n"


def test_one_of_an_earlier_version_leaves_another_of_its_name_as_it_is(url: str, tmp_path: Path) -> None:
    """Their names have no digits, and could be used twice."""
    run = tmp_path / "first"
    for root, folder in ((tmp_path / "store", folder_of(tmp_path / "store", 3)), (run, save(run, 3, value=9.0))):
        manifest = Manifest.read(folder).model_copy(update={"ancestors": (), "orphaned": ()})
        manifest.write(folder)
        folder.rename(root / "checkpoints/step-00000003")
    for _ in range(2):
        fetched = fetch_checkpoint(f"{url}/checkpoints/step-00000003", RunFolder(run))
        assert open_checkpoint(fetched).read("weight/w")[0] == 3
    assert open_checkpoint(run / "checkpoints/step-00000003").read("weight/w")[0] == 9
    assert len([name for name in folders_in(run) if "step-00000003" in name]) == 2


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda file: file.write_bytes(b"")], ids=["flip", "gone", "cut"])
def test_a_damaged_one_is_passed_over_with_a_sentence(damage: object, url: str, tmp_path: Path) -> None:
    damage(stored(tmp_path, 6))  # type: ignore[operator]
    found = newer(url, tmp_path / "new")
    assert found is not None
    assert found.checkpoint is not None
    assert found.checkpoint.step == 3
    (sentence,) = found.problems
    assert without_digits(sentence).startswith(f"`{url}/checkpoints/step-00000006/tensors-")
    assert not list((tmp_path / "new/checkpoints").glob(".*"))


def test_one_without_a_name_does_not_count(url: str, tmp_path: Path) -> None:
    (stored(tmp_path, 6).parent / "checkpoint.json").unlink()
    found = newer(url, tmp_path / "new")
    assert found is not None
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.problems) == (3, [])


def test_a_damaged_one_of_this_disk_is_replaced(url: str, tmp_path: Path) -> None:
    (file,) = folder_of(tmp_path / "first", 6).glob("*.safetensors")
    flip(file)
    found = newer(url, tmp_path / "first", than=3)
    assert found is not None
    assert found.checkpoint is not None
    found.checkpoint.verify()
    assert open_checkpoint(tmp_path / "first").step == 6


def test_one_that_may_not_be_resumed_is_not_fetched(url: str, tmp_path: Path) -> None:
    def refuse(found: Checkpoint) -> None:
        raise CheckpointError("of another run")

    with pytest.raises(CheckpointError, match="of another run"):
        fetch_newer(-1, url, RunFolder(tmp_path / "new"), Group(), refuse)
    assert not (tmp_path / "new/checkpoints").exists()


def test_a_store_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="must be reachable, but is not"):
        newer(f"file://{tmp_path}/closed/\0", tmp_path / "new")


def test_a_run_its_checkpoints_and_one_of_them_can_be_named(url: str, tmp_path: Path) -> None:
    named = f"/checkpoints/{folder_of(tmp_path / 'store', 3).name}"
    meant = {"": 6, "/checkpoints": 6, "/": 6, named: 3, "/checkpoints/step-00000003": 3, "/checkpoints/3": 3}
    for name, step in meant.items():
        assert open_checkpoint(fetch_checkpoint(f"{url}{name}", RunFolder(tmp_path / "new"))).step == step
    with pytest.raises(
        CheckpointError, match="must be a checkpoint, or the folder of a run that has one, but holds none"
    ):
        fetch_checkpoint(f"file://{tmp_path}/nowhere", RunFolder(tmp_path / "new"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_commands_take_far_checkpoints(url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store" / name).write_text("{}")
    folder = checkpoint_path(url)
    assert open_checkpoint(folder).step == 6
    assert RunFolder.of(folder).tokenizer.read_text() == "{}"
    before = next(folder.glob("*.safetensors")).stat().st_mtime_ns
    assert checkpoint_path(url) == folder
    assert next(folder.glob("*.safetensors")).stat().st_mtime_ns == before
    flip(next(folder.glob("*.safetensors")))
    open_checkpoint(checkpoint_path(url)).verify()
    assert checkpoint_path(str(tmp_path)) == tmp_path
    shutil.rmtree(folder_of(tmp_path / "store", 6))
    branch = save(tmp_path / "branch", 6, value=7.0)
    shutil.copytree(branch, tmp_path / "store/checkpoints" / branch.name)
    (tmp_path / "store/checkpoints/latest").write_text(branch.name)
    assert open_checkpoint(checkpoint_path(url)).read("weight/w")[0] == 7


def test_one_that_is_named_does_not_become_the_newest_of_the_run(url: str, tmp_path: Path) -> None:
    """The session that named it may yet be refused, and the next one goes on from what was the newest."""
    folder_of(tmp_path / "first", 3).rename(tmp_path / "lost")
    fetch_checkpoint(f"{url}/checkpoints/step-00000003", RunFolder(tmp_path / "first"))
    assert open_checkpoint(tmp_path / "first").step == 6


def test_a_newer_one_becomes_the_newest_of_the_run(url: str, tmp_path: Path) -> None:
    (tmp_path / "first/checkpoints/latest").write_text(folder_of(tmp_path / "first", 3).name)
    assert newer(url, tmp_path / "first", than=3) is not None
    assert open_checkpoint(tmp_path / "first").step == 6


def test_a_session_that_was_killed_once_it_had_fetched_is_followed_by_another(url: str, tmp_path: Path) -> None:
    assert newer(url, tmp_path / "new") is not None
    read_state(RemoteStorage.of(url), RunFolder(tmp_path / "new"), "auto")


def test_the_log_is_here_before_the_checkpoint_counts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the session killed in between, no other would fetch it, and the mirror's would be overwritten."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "store/metrics.jsonl").write_text('{"step": 6}\n')
    monkeypatch.setattr(downloading.DiskStorage, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        newer(url, tmp_path / "new")
    assert (tmp_path / "new/metrics.jsonl").read_text() == '{"step": 6}\n'


def test_what_goes_wrong_here_is_no_damage_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError("here")

    monkeypatch.setattr(downloading.DiskStorage, "publish", gone)
    with pytest.raises(CheckpointError, match="must take a checkpoint, but cannot"):
        newer(url, tmp_path / "new")


def test_a_damaged_one_that_a_name_means_is_told(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(stored(tmp_path, 6))
    assert open_checkpoint(fetch_checkpoint(url, RunFolder(tmp_path / "new"))).step == 3
    said = capsys.readouterr()
    assert without_digits(said.err).startswith(f"skipped: `{url}/checkpoints/step-00000006/tensors-")
    assert said.out == ""


def test_commands_at_the_same_time_fetch_one_after_the_other(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunFolder.of(checkpoint_path(f"{url}/checkpoints/step-00000003")).path
    half = run / "checkpoints/.step-00000006-abcdef.partial"
    half.mkdir()
    fetched: list[Path] = []
    other = threading.Thread(target=lambda: fetched.append(checkpoint_path(f"{url}/checkpoints/step-00000003")))
    with (run / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder_of(run, 3) / "checkpoint.json").unlink()  # to be fetched again
        other.start()
        other.join(0.5)
        assert half.exists()
        assert fetched == []
    other.join(20)
    assert open_checkpoint(*fetched).step == 3


@pytest.mark.parametrize("run", ["mine", "12", "checkpoints"])
def test_a_run_in_a_folder_named_checkpoints_has_its_tokenizer(
    run: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "store").rename(tmp_path / "checkpoints" / run)
    (tmp_path / "checkpoints" / run / "tokenizer.json").write_text("{}")
    for name in ("", "/", "/checkpoints", "/checkpoints/step-00000003", "/checkpoints/step-00000003/"):
        folder = checkpoint_path(f"file://{tmp_path}/checkpoints/{run}{name}")
        assert RunFolder.of(folder).tokenizer.read_text() == "{}"


def test_one_whose_upload_was_killed_before_latest_counts(url: str, tmp_path: Path) -> None:
    """It is whole in the store; the disk that had it may be lost."""
    RemoteStorage.of(url).put(save(tmp_path / "first", 8), lambda: None)
    assert fetched_step(url, tmp_path / "new") == 8
    RemoteStorage.of(url).put(save(tmp_path / "first", 9, parent_step=3), lambda: None)
    assert fetched_step(url, tmp_path / "another") == 8  # this went back from 6


def test_a_disk_whose_newest_the_mirror_went_back_from_follows_the_mirror(url: str, tmp_path: Path) -> None:
    """Else a node with an older disk would go on from what another session had turned away from, and remove from the
    mirror what that has saved."""
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with mirror(url, tmp_path / "second", keep=9) as sending:
        sending.enqueue(save(tmp_path / "second", 5, parent_step=3))
    assert fetched_step(url, tmp_path / "first", than=6) == 5
    assert open_checkpoint(tmp_path / "first").step == 5
    assert newer(url, tmp_path / "first", than=5) is None
