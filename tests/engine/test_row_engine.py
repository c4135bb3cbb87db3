"""Body and table are updated together or not at all, and come back from what is kept, bit for bit."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.distributed import tensors as blocks
from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors, RoundRobinShard, interleave_shards
from megahead.objectives.pretraining import initial_weights
from support.long import long, long_but
from support.on_ranks import on_ranks
from support.precisions import PRECISIONS
from support.small_rows import RowCourse


def without_a_trace(group: Group, stage: int) -> dict[str, Any]:
    """Good steps with bad ones in between, beside a course of the good ones alone."""
    wrong: dict[str, Any] = {}
    for precision in PRECISIONS[: 2 if stage == 0 else 3]:
        course, bystander = (RowCourse(group, stage, {"engine.precision": precision}) for _ in range(2))
        told = [each.step(1).applied for each in (course, bystander)]
        scale = course.engine.loss_scale.state()
        course.gather(2)
        told += [not course.engine.skip_step().applied]
        told += [not course.step(3, nan if group.rank == group.size - 1 else 1.0).applied]
        course.engine.loss_scale.restore(scale)
        told += [course.differs(bystander) == []]
        told += [each.step(4).applied for each in (course, bystander)]
        told += [course.differs(bystander) == [], course.engine.optimizer_steps == 2]
        if not all(told):
            wrong[precision] = told, course.differs(bystander)
    return wrong


@pytest.mark.parametrize(
    ("stage", "ranks"),
    long_but([(0, 1), (2, 2), (3, 1)], [(s, ranks) for s in (0, 1, 2, 3) for ranks in (1, 2)]),
)
def test_what_is_not_applied_leaves_no_trace(stage: int, ranks: int) -> None:
    assert on_ranks(ranks, without_a_trace, stage) == [{}] * ranks


def kept_whole(course: RowCourse) -> dict[str, Tensor]:
    """What checkpoints hold: whole tensors."""
    group, whole = course.mesh.world_group, {}
    for name, tensor in course.engine.tensors():
        if isinstance(tensor, RoundRobinShard):
            whole[name] = interleave_shards(group.all_gather_objects(tensor.part)).clone()
        else:
            whole[name] = tensor.clone()
    return whole


def first_rows(group: Group, stage: int, precision: str) -> bool:
    """Whether the rows start as the first weights of a dense run, to the last bit."""
    course = RowCourse(group, stage, {"engine.precision": precision})
    begun = kept_whole(course)["late/weight/backbone.embedding.weight"]
    return torch.equal(begun, initial_weights(course.config).read("backbone.embedding.weight"))


@pytest.mark.parametrize(("ranks", "stage", "precision"), [(1, 0, "fp32"), (2, 1, "bf16"), long(4, 3, "fp32")])
def test_rows_start_from_the_first_weights_read_in_blocks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int, precision: str
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 144)
    assert on_ranks(ranks, first_rows, stage, precision) == [True] * ranks


def resumed(group: Group, stage: int, changes: dict[str, Any]) -> dict[str, Any]:
    first = RowCourse(group, stage, changes)
    for number in range(7):
        first.step(number)
    saved, steps = kept_whole(first), first.engine.optimizer_steps
    second = RowCourse(group, stage, changes)
    second.step(50)
    second.engine.load(FullTensors(saved.__getitem__), steps)
    second.engine.loss_scale.restore(first.engine.loss_scale.state())
    loaded = first.differs(second)
    logs = [[(each.gather(n), each.engine.step(1e-3).grad_norm) for n in range(7, 10)] for each in (first, second)]
    return {"loaded": loaded, "same log": logs[0] == logs[1], "later": first.differs(second)}


@pytest.mark.parametrize(
    ("ranks", "stage", "changes"),
    [
        (1, 0, {}),
        (2, 1, {"engine.precision": "bf16"}),
        long(4, 2, {}),
        (2, 3, {}),
        (2, 1, {"optimizer.table": {"rule": "adamw_row", "learning_rate_ratio": 8}}),
        long(2, 0, {"optimizer.table": {"rule": "adagrad"}}),
    ],
)
def test_a_resumed_course_is_the_uninterrupted_one_bit_for_bit(ranks: int, stage: int, changes: dict[str, Any]) -> None:
    for outcome in on_ranks(ranks, resumed, stage, changes):
        assert outcome == {"loaded": [], "same log": True, "later": []}


def course_of(group: Group, given: dict[str, Tensor] | None, begun: int, until: int) -> tuple[dict[str, Tensor], ...]:
    course = RowCourse(group, begun % 4)
    if given is not None:
        course.engine.load(FullTensors(given.__getitem__), begun)
    loaded = kept_whole(course)
    for number in range(begun, until):
        course.step(number)
    return loaded, kept_whole(course)


def test_any_stage_and_number_of_ranks_goes_on_from_any_other() -> None:
    ((_, straight),) = on_ranks(1, course_of, None, 0, 13)
    left: dict[str, Tensor] | None = None
    for ranks, begun, until in ((1, 0, 3), (2, 3, 6), (4, 6, 9), (1, 9, 13)):
        results = on_ranks(ranks, course_of, left, begun, until)
        for loaded, _ in results:
            assert left is None or all(torch.equal(left[name], loaded[name]) for name in left)
        left = results[0][1]
    assert left is not None
    assert straight.keys() == left.keys()
    for name, expected in straight.items():
        torch.testing.assert_close(left[name], expected, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert (straight["late/touched/backbone.embedding.weight"] < 7).any(), "no row was stale"


def ratios(group: Group) -> tuple[float, float]:
    """How far the table goes in the first step, at two rates for it alone."""
    gone = []
    for ratio in (1.0, 4.0):
        course = RowCourse(group, 0, {"optimizer.table": {"learning_rate_ratio": ratio}, "optimizer.weight_decay": 0.0})
        before = course.state()
        course.step(0)
        after = course.state()
        names = "late/weight/backbone.embedding.weight", "weight/backbone.final_norm.bias"
        gone.append([float((after[name] - before[name]).abs().max()) for name in names])
    return gone[1][0] / gone[0][0], gone[1][1] / gone[0][1]


def test_rows_have_a_rate_of_their_own() -> None:
    for rows, body in on_ranks(1, ratios):
        assert rows == pytest.approx(4, rel=1e-3)
        assert body == 1


def unclipped(group: Group) -> list[str]:
    """What differs between no limit and one that is out of reach."""
    courses = [RowCourse(group, 1, {"optimizer.gradient_clipping": limit}) for limit in (0.0, 1e9)]
    before = courses[0].state()
    for course in courses:
        course.step(0)
    assert not torch.equal(before["late/weight/backbone.embedding.weight"], courses[0].table.state()["weight"].part)
    return courses[0].differs(courses[1])


def test_without_clipping_rows_go_all_the_way() -> None:
    assert on_ranks(2, unclipped) == [[], []]


def moments(group: Group, precision: str) -> Tensor:
    course = RowCourse(group, 1, {"engine.precision": precision})
    assert course.step(0).applied
    return course.table.state()["exp_avg"].part


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_gradients_of_rows_are_those_of_full_precision_without_the_loss_scale(precision: str) -> None:
    """Adam's steps would hide another scale, its moments do not."""
    full, half = (on_ranks(2, moments, each) for each in ("fp32", precision))
    for expected, ours in zip(full, half, strict=True):
        assert (ours - expected).norm() < 0.02 * expected.norm()


def too_early(group: Group) -> list[str]:
    course, told = RowCourse(group), []
    for act in (lambda: course.engine.micro_step(course._micro_batch(0, 0, 1.0)), lambda: course.table.step(1.0, 1.0)):
        with pytest.raises(RuntimeError) as error:
            act()
        told.append(str(error.value))
    return told


def test_steps_out_of_turn_are_refused() -> None:
    ((looked_up, updated),) = on_ranks(1, too_early)
    assert "fetched before" in looked_up
    assert "updated once" in updated
