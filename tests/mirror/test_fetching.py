"""Checkpoints from a store: the newest sound one, verified before it has a name here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megahead.checkpoint import Checkpoint, open_checkpoint
from megahead.checkpoint.folders import set_aside
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.mirror import FarRun, Fetched, far_or_existing, fetch_named, fetch_newer, refuse_another_mirror
from megahead.run_folder import RunFolder
from support.mirrored import finish, mirror, save
from support.on_ranks import on_ranks


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A mirror with checkpoints of steps 3 and 6."""
    (tmp_path / "store").mkdir()
    address = f"file://{tmp_path}/store"
    with mirror(address, tmp_path / "first", keep=9) as sending:
        for step in (3, 6):
            sending.offer(save(tmp_path / "first", step), step - 3)
            finish(sending)
    return address


def stored(tmp_path: Path, step: int) -> Path:
    (file,) = (tmp_path / f"store/checkpoints/step-0000000{step}").glob("*.safetensors")
    return file


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def newer(url: str, folder: Path, than: int = -1, group: Group = Group()) -> Fetched | None:  # noqa: B008 - frozen
    return fetch_newer(than, url, RunFolder(folder), group, lambda found: None)


def fetched_on(group: Group, url: str, folder: Path) -> tuple[int, list[str]]:
    found = newer(url, folder, group=group)
    assert found is not None
    assert found.checkpoint is not None
    return found.checkpoint.step, found.problems


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_empty_disk_gets_the_newest(ranks: int, url: str, tmp_path: Path) -> None:
    assert on_ranks(ranks, fetched_on, url, tmp_path / "new") == [(6, [])] * ranks
    assert [path.name for path in (tmp_path / "new/checkpoints").iterdir() if path.is_dir()] == ["step-00000006"]
    assert (tmp_path / "new/checkpoints/latest").read_text() == "step-00000006\n"


def test_nothing_that_is_not_newer_is_fetched(url: str, tmp_path: Path) -> None:
    assert newer(url, tmp_path / "new", than=6) is None
    assert not (tmp_path / "new").exists()


def test_one_that_this_disk_has_set_aside_is_not_newer(url: str, tmp_path: Path) -> None:
    set_aside([tmp_path / "first/checkpoints/step-00000006"])
    assert newer(url, tmp_path / "first", than=3) is None


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda file: file.write_bytes(b"")], ids=["flip", "gone", "cut"])
def test_a_damaged_one_is_passed_over_with_a_sentence(damage: object, url: str, tmp_path: Path) -> None:
    damage(stored(tmp_path, 6))  # type: ignore[operator]
    found = newer(url, tmp_path / "new")
    assert found is not None
    assert found.checkpoint is not None
    assert found.checkpoint.step == 3
    (sentence,) = found.problems
    assert sentence.startswith(f"`{url}/checkpoints/step-00000006/tensors-")
    assert not list((tmp_path / "new/checkpoints").glob(".*"))


def test_one_without_a_name_does_not_count(url: str, tmp_path: Path) -> None:
    (stored(tmp_path, 6).parent / "checkpoint.json").unlink()
    found = newer(url, tmp_path / "new")
    assert found is not None
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.problems) == (3, [])


def test_a_damaged_one_of_this_disk_is_replaced(url: str, tmp_path: Path) -> None:
    (file,) = (tmp_path / "first/checkpoints/step-00000006").glob("*.safetensors")
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
    for name, step in {"": 6, "/checkpoints": 6, "/checkpoints/step-00000003": 3, "/": 6}.items():
        assert open_checkpoint(fetch_named(f"{url}{name}", RunFolder(tmp_path / "new"))).step == step
    with pytest.raises(
        CheckpointError, match="must be a checkpoint, or the folder of a run that has one, but holds none"
    ):
        fetch_named(f"file://{tmp_path}/nowhere", RunFolder(tmp_path / "new"))


def test_commands_take_far_checkpoints(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store/tokenizer.json").write_text("{}")
    folder = far_or_existing(url)
    assert open_checkpoint(folder).step == 6
    assert RunFolder.of(folder).tokenizer.read_text() == "{}"
    before = next(folder.glob("*.safetensors")).stat().st_mtime_ns
    assert far_or_existing(url) == folder
    assert next(folder.glob("*.safetensors")).stat().st_mtime_ns == before
    flip(next(folder.glob("*.safetensors")))
    open_checkpoint(far_or_existing(url)).verify()
    assert far_or_existing(str(tmp_path)) == tmp_path


def test_a_mirror_is_one_runs(url: str, tmp_path: Path) -> None:
    other, fresh = RunFolder(tmp_path / "other"), RunFolder(tmp_path / "fresh")
    save(other.path, 2)
    sentence = rf"`training\.mirror` must be this run's or empty, but {url} is that of another"
    for folder, resume in ((other, "auto"), (fresh, str(tmp_path / "first"))):
        with pytest.raises(CheckpointError, match=sentence):
            refuse_another_mirror(FarRun(url), folder, resume)
    with pytest.raises(
        CheckpointError,
        match=r"`--resume never` needs a mirror without checkpoints, but .* has checkpoints/step-00000006;",
    ):
        refuse_another_mirror(FarRun(url), fresh, "never")
    refuse_another_mirror(FarRun(url), RunFolder(tmp_path / "first"), "auto")
    refuse_another_mirror(FarRun(url), fresh, "auto")
    refuse_another_mirror(FarRun(url), fresh, f"{url}/checkpoints/step-00000003")
    refuse_another_mirror(FarRun(f"file://{tmp_path}/empty"), other, "auto")
