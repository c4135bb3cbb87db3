"""A run that goes back to an older checkpoint: what it turned away from is orphaned, never counted, and not lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megahead.checkpoints.disk import DiskStorage, find_checkpoint, is_complete, orphaned_folders, step_folders
from megahead.checkpoints.format import Manifest
from megahead.checkpoints.reading import newest_valid, open_checkpoint
from megahead.checkpoints.store import Latest, RetentionRules, ancestors_among, step_of
from megahead.distributed.group import Group
from megahead.run_folder import RunFolder
from megahead.train.progress import RunHistory
from support.dying import die_at
from support.named import folder_of, orphaned_steps, steps_of_history
from support.saved import save_checkpoint


def save(
    root: Path,
    step: int,
    keep: int = 2,
    parent_step: int | None = None,
    rules: RetentionRules = RetentionRules(),  # noqa: B008 - frozen
    loss: float = 1.0,
) -> Path:
    state = {"validation": {"step": step, "loss": loss}}
    tensors = {"weight": torch.full((5,), loss)}
    return save_checkpoint(
        root,
        step,
        tensors.items(),
        state=state,
        config={},
        group=Group(),
        rules=replace(rules, newest=keep),
        parent_step=parent_step,
    )


def damage(root: Path, step: int) -> None:
    (file,) = folder_of(root, step).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def both(root: Path) -> tuple[list[int], list[int]]:
    """The steps of the history, and of what is orphaned."""
    return steps_of_history(root), orphaned_steps(root)


def found(root: Path) -> int:
    checkpoint, _ = newest_valid(root)
    assert checkpoint is not None
    return checkpoint.step


def test_a_damaged_one_that_was_passed_over_does_not_cost_a_sound_one(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        save(tmp_path, step)
    damage(tmp_path, 12)
    save(tmp_path, 10, parent_step=8)
    assert both(tmp_path) == ([8, 10], [12])
    assert found(tmp_path) == 10


def test_what_lies_between_an_older_one_and_the_next_save_belongs_to_neither(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=4)
    save(tmp_path, 5, parent_step=2)
    assert both(tmp_path) == ([2, 5], [4, 6, 8])
    damage(tmp_path, 5)
    assert found(tmp_path) == 2


def test_one_that_goes_on_from_elsewhere_leaves_none_of_the_folders_own(tmp_path: Path) -> None:
    for step in (2, 8):
        save(tmp_path, step)
    save(tmp_path, 5, parent_step=-1)
    assert both(tmp_path) == ([5], [2, 8])


def test_a_step_orphaned_twice_is_kept_twice_and_can_be_opened_by_its_name(tmp_path: Path) -> None:
    save(tmp_path, 2)
    orphaned = []
    for loss in (3.0, 4.0):
        orphaned.append(save(tmp_path, 8, parent_step=2, loss=loss))
        newest = save(tmp_path, 4, parent_step=2)
    assert both(tmp_path) == ([2, 4], [4, 8, 8])
    assert {folder.name for folder in orphaned} < {folder.name for folder in orphaned_folders(tmp_path)}
    assert [open_checkpoint(folder).read("weight")[0] for folder in orphaned] == [3.0, 4.0]
    assert [find_checkpoint(tmp_path / name) for name in ("step-00000004", "4", "8")] == [newest, newest, None]


def test_neither_milestones_nor_the_best_of_another_history_count(tmp_path: Path) -> None:
    rules = RetentionRules(every=4, best=1)
    for step, loss in ((2, 5.0), (4, 4.0), (6, 0.5), (8, 0.6)):
        save(tmp_path, step, keep=1, rules=rules, loss=loss)
    assert steps_of_history(tmp_path) == [4, 6, 8]
    for step, loss in ((5, 3.0), (7, 3.5)):
        save(tmp_path, step, keep=1, rules=rules, loss=loss, parent_step=4 if step == 5 else 5)
    assert both(tmp_path) == ([4, 5, 7], [6, 8])  # 4 a milestone, 5 the best of this history


def test_names_are_never_used_twice_and_each_names_its_ancestors(tmp_path: Path) -> None:
    first, second, back = save(tmp_path, 2), save(tmp_path, 4), save(tmp_path, 4, parent_step=2)
    assert len({first.name, second.name, back.name}) == 3
    assert Manifest.read(second).ancestors == Manifest.read(back).ancestors == (first.name,)
    assert (Manifest.read(second).orphaned, Manifest.read(back).orphaned) == ((), (second.name,))
    assert DiskStorage(tmp_path).latest == Latest(back.name, (first.name,))


def test_one_whose_list_of_parents_is_damaged_is_passed_over_without_an_orphan_in_its_place(tmp_path: Path) -> None:
    for step in (2, 6):
        save(tmp_path, step, keep=9)
    kept = save(tmp_path, 4, keep=9, parent_step=2)
    (save(tmp_path, 5, keep=9) / "checkpoint.json").write_text("{")
    (tmp_path / "latest").unlink()
    checkpoint, damage = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.folder == kept
    assert len(damage) == 1


def test_a_step_saved_again_with_an_evaluation_takes_no_older_ones_place(tmp_path: Path) -> None:
    for step in (2, 4, 4):
        newest = save(tmp_path, step, keep=2)
    assert [step_of(folder) for folder in step_folders(tmp_path)] == [4, 2]
    assert find_checkpoint(tmp_path) == newest


def test_folders_of_earlier_versions_are_continued(tmp_path: Path) -> None:
    """They have no digits, and say nothing of their ancestors: each continues what has a lower step."""
    for step in (2, 4, 6):
        as_before(save(tmp_path, step, keep=9))
    (tmp_path / "latest").write_text("step-00000006\n")
    assert both(tmp_path) == ([2, 4, 6], [])
    assert (found(tmp_path), find_checkpoint(tmp_path / "step-00000004")) == (6, tmp_path / "step-00000004")
    save(tmp_path, 8, keep=9)
    assert both(tmp_path) == ([2, 4, 6, 8], [])
    save(tmp_path, 5, keep=9, parent_step=4)
    assert both(tmp_path) == ([2, 4, 5], [6, 8])
    save(tmp_path, 7, keep=2)
    assert both(tmp_path) == ([5, 7], [6, 8])


def as_before(folder: Path) -> None:
    """As an earlier version would have written it."""
    manifest = Manifest.read(folder).model_copy(update={"ancestors": (), "orphaned": ()})
    manifest.write(folder)
    folder.rename(folder.with_name(f"step-{manifest.step:08d}"))


OLD, NEW = 1.0, 2.0


@pytest.mark.parametrize(("parent_step", "step"), [(2, 5), (2, 6), (-1, 5), (-1, 6)])
def test_a_process_killed_anywhere_in_turning_away_leaves_one_history_and_no_mixture(
    parent_step: int, step: int, tmp_path: Path
) -> None:
    """Ends the process at its 1st, 2nd, ... durable act until one save gets through."""
    survived, newest = False, set()
    for old in (2, 4, 6, 8):
        save(tmp_path / "old", old, keep=9, loss=OLD)
    for point in range(100):
        root = shutil.copytree(tmp_path / "old", tmp_path / str(point))
        child = os.fork()
        if child == 0:
            die_at(point)
            save(root, step, keep=9, parent_step=parent_step, loss=NEW)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        checkpoint, damage = newest_valid(root)
        assert checkpoint is not None
        assert not damage
        loss = loss_of(checkpoint.folder)
        newest.add((checkpoint.step, loss))
        save(root, 9, keep=9, loss=loss)
        assert_one_history(step_folders(root), loss, parent_step)
        if survived:
            break
    assert survived
    assert newest == {(8, OLD), (step, NEW)}


def assert_one_history(folders: Sequence[Path], loss: float, parent_step: int) -> None:
    for folder in folders:
        assert loss_of(folder) == loss or step_of(folder) <= parent_step, folder


def loss_of(folder: Path) -> float:
    return float(open_checkpoint(folder).read("weight")[0])


@pytest.mark.parametrize("has_damaged_successor", [False, True])
def test_one_that_a_crash_left_without_its_name_has_it_again_after_the_next_save(
    tmp_path: Path, has_damaged_successor: bool
) -> None:
    """Earlier versions renamed the old one of a step while the new one took its name."""
    as_before(save(tmp_path, 4))
    name = tmp_path / "step-00000004"
    name.rename(f"{name}.replaced")
    if has_damaged_successor:
        shutil.copytree(f"{name}.replaced", name)
        next(name.glob("*.safetensors")).write_bytes(b"")
    save(tmp_path, 8)
    assert steps_of_history(tmp_path) == [4, 8]
    assert is_complete(name)


def test_a_log_counts_up_to_where_the_history_that_is_resumed_left_the_present_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 4, 6):
        save(run.checkpoints, step, keep=9)
    save(run.checkpoints, 5, keep=9, parent_step=2)
    for step, shared in ((6, 2), (4, 2), (2, 2), (5, 5)):
        resumed = open_checkpoint(folder_of(run.checkpoints, step))
        assert RunHistory.after_resume(resumed, run).last_common_step() == shared
    assert RunHistory.after_resume(None, run).last_common_step() == 0


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("step", [5, 7])
def test_where_the_newest_is_lost_with_its_manifest_no_orphan_takes_its_place(
    step: int, gone: bool, tmp_path: Path
) -> None:
    for earlier in (2, 4, 6, 8):
        save(tmp_path, earlier, keep=9)
    newest = save(tmp_path, step, keep=9, parent_step=4)
    shutil.rmtree(newest) if gone else (newest / "checkpoint.json").write_text("{")
    assert found(tmp_path) == 4
    assert set(orphaned_steps(tmp_path)) == {6, 8}


def test_where_all_that_led_to_a_lost_one_is_gone_orphans_must_be_named(tmp_path: Path) -> None:
    save(tmp_path, 8)
    save(tmp_path, 2, parent_step=-1, keep=1)
    shutil.rmtree(save(tmp_path, 4, keep=1))
    assert (step_folders(tmp_path), orphaned_steps(tmp_path)) == ([], [8])


def test_of_two_of_one_step_the_one_that_was_saved_last_comes_first() -> None:
    later, earlier, older = "step-00000004-000000", "step-00000004-ffffff", "step-00000002-aaaaaa"
    assert ancestors_among((later, earlier, older), {older, earlier, later, "step-00000009-000000"}) == [
        later,
        earlier,
        older,
    ]
