"""What a run remembers beside its weights: through a checkpoint and back, taken back after a bad step, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.data.batch import Batch
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.train.progress import TrainingState
from support.on_ranks import on_ranks
from support.saved import save_checkpoint

READ = {"samples": 40, "tokens": 960, "skipped_steps": 2, "spikes": 3, "rollbacks": 1, "seconds": 2.5}
LEARNED = {"step": 4, "targets": 300, "recent_losses": [5.0, 4.5], "validation": {"step": 4, "loss": 4.0}}
SETTLED = {"target_samples": 32, "group_samples": 8, "texts": {"data.train": ["a"]}}
COUNTS = torch.tensor([5, 0, 7])


def state_of(**values: Any) -> TrainingState:
    state = TrainingState(len(COUNTS), group_samples=8)
    for name, value in values.items():
        setattr(state, "data_fingerprints" if name == "texts" else name, value)
    return state


def saved(root: Path, state: dict[str, Any], counts: Tensor = COUNTS, **config: Any) -> Checkpoint:
    tensors = [("state/target_counts", counts)]
    save_checkpoint(root, 4, tensors, state=state, config=config, group=Group())
    return open_checkpoint(root)


def targets(*ids: int) -> Batch:
    return Batch(torch.zeros(1, 4, dtype=torch.int64), None, torch.arange(len(ids)), torch.tensor(ids))


def test_what_is_remembered_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    written = state_of(**READ, **LEARNED, **SETTLED).counters()
    assert written == READ | LEARNED | SETTLED
    resumed = TrainingState(len(COUNTS), 8, data_fingerprints=SETTLED["texts"])  # type: ignore[arg-type]
    resumed.restore(saved(tmp_path, written), Group())
    assert resumed.counters() == written


def test_what_is_about_to_be_saved_does_not_follow_the_run() -> None:
    state = state_of(recent_losses=[5.0])
    written = state.counters()
    state.recent_losses.append(4.0)
    assert written["recent_losses"] == [5.0]


def test_a_run_that_begins_has_counted_nothing() -> None:
    state = TrainingState(len(COUNTS), 8)
    assert not any(state.counters()[name] for name in (*READ, *LEARNED, "target_samples"))
    assert state.dataset_counts.tolist() == state.target_counts(Group()).tolist() == [0, 0, 0]
    assert state.dataset_counts.dtype == state.local_target_counts.dtype == torch.int64
    state.count_targets(targets(1, 2, 1))
    assert state.target_counts(Group()).tolist() == [0, 2, 1]


def test_going_back_forgets_what_was_learned_and_keeps_what_was_read(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, state_of(**READ, **LEARNED, **SETTLED).counters())
    further = {name: 2 * value for name, value in READ.items()}
    later = state_of(
        **further, step=6, targets=450, target_samples=48, recent_losses=[3.0], data_fingerprints=SETTLED["texts"]
    )
    later.count_targets(targets(1, 1))
    later.roll_back_to(checkpoint, Group())
    assert later.counters() == further | LEARNED | SETTLED
    assert torch.equal(later.local_target_counts, COUNTS)
    later.recent_losses.append(9.0)
    assert checkpoint.state["recent_losses"] == LEARNED["recent_losses"]


def resumed_counts(group: Group, root: str) -> list[int]:
    """Over all ranks, twice, of a run whose ranks see one more target each."""
    state = TrainingState(len(COUNTS), 8)
    state.restore(open_checkpoint(Path(root)), group)
    state.count_targets(targets(1, 2, 2))
    state.target_counts(group)
    return state.target_counts(group).tolist()


def test_targets_are_counted_once_over_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path, state_of().counters())
    assert on_ranks(2, resumed_counts, str(tmp_path)) == [[5, 2, 11]] * 2


@pytest.mark.parametrize(("name", "absent"), [("spikes", 0), ("rollbacks", 0), ("recent_losses", [])])
def test_counters_that_earlier_versions_did_not_have_begin_anew(tmp_path: Path, name: str, absent: Any) -> None:
    counters = state_of(**READ, **LEARNED, **SETTLED).counters()
    del counters[name]
    resumed = TrainingState(len(COUNTS), 8)
    for each in (saved(tmp_path / "a", counters), saved(tmp_path / "b", counters)):
        resumed.restore(each, Group())
        assert getattr(resumed, name) == absent
        if name == "recent_losses":
            resumed.recent_losses.append(1.0)


WRONG: dict[str, Any] = dict.fromkeys((*READ, "step", "targets", "target_samples"), "many")
WRONG |= {"recent_losses": None, "validation": 4.0}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_that_states_a_counter_wrongly_or_not_at_all_is_refused(tmp_path: Path, name: str) -> None:
    counters = state_of(**READ, **LEARNED, **SETTLED).counters()
    old = {"spikes", "rollbacks", "recent_losses", "validation"}  # may be missing
    without = {key: value for key, value in counters.items() if key != name}
    for wrong in ([counters | {name: WRONG[name]}], [without])[: 1 if name in old else 2]:
        checkpoint = saved(tmp_path, *wrong)
        with pytest.raises(CheckpointError, match=f"has no valid `{name}`; use another checkpoint"):
            TrainingState(len(COUNTS), 8).restore(checkpoint, Group())


def test_counts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, state_of().counters(), counts=torch.ones(4, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=r"must count 3 ids, but has \(4,\) instead"):
        TrainingState(len(COUNTS), 8).restore(checkpoint, Group())


def test_an_evaluation_counts_for_the_step_it_was_made_at() -> None:
    state = state_of(step=2)
    assert not state.evaluated
    state.record_applied_step(samples=4, targets=40)
    state.validation = {"step": 3, "loss": 4.0}
    assert state.evaluated
    state.record_applied_step(samples=8, targets=100)
    assert (state.step, state.target_samples, state.targets) == (4, 12, 140)
    assert not state.evaluated


def test_a_group_has_what_is_expected_of_its_rows_until_a_step_was_applied() -> None:
    state = TrainingState(64, group_samples=4)
    state.samples = 8
    assert state.mean_group_targets(expected=24) == 96
    state.record_applied_step(8, 188)
    assert state.mean_group_targets(expected=24) == 94
