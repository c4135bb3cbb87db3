"""An output folder appears whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megahead.errors import FieldError, UserError
from megahead.files import InUseError, atomic_folder


def test_nothing_is_left_of_a_block_that_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out") as folder:
        folder.joinpath("half").write_text("written") and 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_the_old_folder_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with atomic_folder(output, replaceable="mark") as folder:
        (folder / "mark").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(output, replaceable="mark"):
        raise RuntimeError
    assert (output / "mark").read_text() == "old"
    with atomic_folder(output, replaceable="mark") as folder:
        (folder / "mark").write_text("new")
        assert (output / "mark").read_text() == "old"
    assert (output / "mark").read_text() == "new"
    assert list(tmp_path.iterdir()) == [output]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    output = tmp_path / "out"
    output.symlink_to(tmp_path / "disk")
    for text in ("old", "new"):
        with atomic_folder(output, replaceable="mark") as folder:
            (folder / "mark").write_text(text)
    assert output.is_symlink()
    assert [path.name for path in tmp_path.iterdir() if path != output] == ["disk"]
    assert (tmp_path / "disk/mark").read_text() == "new"


def test_a_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("precious")
    with pytest.raises(FieldError, match="be a new folder"), atomic_folder(output, replaceable="mark"):
        pytest.fail("the block must not run")
    assert (output / "thesis.tex").read_text() == "precious"


def test_an_earlier_output_in_which_a_training_has_saved_since_is_refused_untouched(tmp_path: Path) -> None:
    saved = tmp_path / "out/checkpoint-500/model.safetensors"
    saved.parent.mkdir(parents=True)
    for file in (saved, tmp_path / "out/mark"):
        file.touch()
    with pytest.raises(FieldError, match="be a new folder"), atomic_folder(tmp_path / "out", replaceable="mark"):
        pytest.fail("the block must not run")
    assert saved.exists()


def test_remains_of_a_killed_run_are_overwritten(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "half").write_text("remains")
    with atomic_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []


def test_a_second_process_waits_for_the_first_to_end(tmp_path: Path) -> None:
    """Else it would remove the files that the first writes."""
    with atomic_folder(tmp_path / "out", replaceable="mark") as folder:
        (folder / "mark").write_text("first")
        with pytest.raises(InUseError, match="another process is writing it"), atomic_folder(tmp_path / "out"):
            pytest.fail("the block must not run")
    assert (tmp_path / "out/mark").read_text() == "first"
    with atomic_folder(tmp_path / "out", replaceable="mark") as folder:
        assert list(folder.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=r"No space left on device.*nothing was kept"), atomic_folder(tmp_path / "out"):
        raise full
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="must be writable"), atomic_folder(tmp_path / "file" / "out"):
        pytest.fail("the block must not run")


def test_a_disk_that_is_full_in_a_copy_is_told(tmp_path: Path) -> None:
    """Such an error names what is copied first."""
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "in"), None, str(tmp_path / "there/in"))
    match = r"`.*out` must be writable, but is not: No space left"
    with pytest.raises(UserError, match=match), atomic_folder(tmp_path / "out"):
        raise error


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"input\.json") as raised, atomic_folder(tmp_path / "out"):
        (tmp_path / "input.json").read_bytes()
    assert not isinstance(raised.value, UserError)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_output_survives_a_new_one_that_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, rename = tmp_path / "out", Path.rename
    output.mkdir()
    (output / "mark").write_text("old")

    def failing(path: Path, target: Path) -> Path:
        if target == output and not path.name.endswith(".replaced.partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="must be writable"), atomic_folder(output, replaceable="mark") as folder:
        (folder / "mark").write_text("new")
    assert (output / "mark").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_output_survives_a_kill_between_both_renames_until_the_next_one(tmp_path: Path) -> None:
    hidden = tmp_path / ".out.replaced.partial"
    hidden.mkdir()
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert hidden.exists()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "mark").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
