"""Runs that end at the same time, and where they part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.verdict import Courses, Part

PART = Part(shape=(), budgets={0: (5, 50), 1: (5,)}, switches={5: (0.1, 0.2, 0.4), 50: (0.2,)})
UNIT = PART.unit


def test_every_run_of_a_budget_takes_its_time() -> None:
    """Vanilla steps take four times as long."""
    courses = Courses(PART, 0, UNIT // 4)
    runs = {course.name: course for course in courses.all()}
    assert len(runs) == 4 + 2 + 4
    for name, course in runs.items():
        taken = courses.time_until(course, course.steps)
        assert taken == pytest.approx(course.budget / 4 if "equal-tokens" in name else course.budget, rel=0.01), name
    for budget in PART.budgets[0]:
        assert runs[f"headless-equal-tokens-{budget}"].steps == runs[f"vanilla-{budget}"].steps
    switched = runs["vanilla-for-the-last-20-50"]
    assert (switched.steps, switched.vanilla_steps) == (40 * 128 + 10 * 32, 10 * 32)
    assert courses.time_until(switched, 40 * 128 + 32) == 41


@pytest.mark.parametrize("falls", [0.2, 0.6])
def test_rates_fall_in_the_last_part_of_the_time_whatever_is_learned_then(falls: float) -> None:
    courses = Courses(replace(PART, decay=falls), 0, UNIT // 4)
    for course in courses.all():
        stable = courses.time_until(course, course.steps - course.decay_steps)
        assert stable == pytest.approx((1 - falls) * courses.time_until(course, course.steps), rel=0.01), course.name


def test_no_run_is_made_twice_where_units_have_as_many_tokens() -> None:
    runs = [course.name for course in Courses(replace(PART, switches={}), 0, UNIT).all()]
    assert runs == ["headless-5", "headless-50", "vanilla-5", "vanilla-50"]


def test_a_run_that_is_shorter_than_five_units_warms_up_for_less() -> None:
    courses = Courses(PART, 1, 20)
    runs = {course.name: course for course in courses.all()}
    warmups = {name: courses.warmup_steps(course) for name, course in runs.items()}
    assert (runs["headless-equal-tokens-5"].trunk, warmups["headless-equal-tokens-5"]) == (None, 20)
    assert (warmups["headless-5"], warmups["vanilla-5"]) == (UNIT, 20)


def test_no_run_warms_up_for_most_of_its_steps() -> None:
    courses = Courses(Part(shape=(), budgets={0: (5,)}, switches={}, unit=64), 0, 18)
    for course in courses.all():
        assert courses.warmup_steps(course) * 5 == course.steps


def test_a_branch_begins_at_a_checkpoint_of_its_trunk_at_which_neither_differs_yet() -> None:
    for seed in PART.budgets:
        courses = Courses(PART, seed, UNIT // 4)
        trunks = {course.name: course for course in courses.trunks()}
        for course in courses.all():
            assert (course.trunk is None) == (course.name in trunks or course.name == "headless-equal-tokens-5")
            if course.trunk is not None:
                trunk = trunks[course.trunk]
                assert course.objective == trunk.objective
                assert 0 < course.fork <= min(trunk.steps - trunk.decay_steps, course.steps - course.decay_steps)
                assert course.fork <= course.steps - course.vanilla_steps
                assert course.fork % courses.units[trunk.objective] == 0
                assert course.fork % courses.kept_every(trunk) == 0
    forks = {course.name: course.fork for course in Courses(PART, 0, UNIT // 4).all()}
    assert forks["headless-5"] == 4 * UNIT
    assert forks["vanilla-for-the-last-40-5"] == 3 * UNIT
    assert forks["vanilla-for-the-last-10-5"] == 4 * UNIT


def test_what_a_part_leaves_out_is_left_out() -> None:
    wide = Part(shape=(), budgets={0: (5,)}, switches={}, kinds=("headless",))
    assert [course.name for course in Courses(wide, 0, 32).all()] == ["headless-5"]
