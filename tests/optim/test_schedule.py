"""Learning-rate schedules: end points, direction, no jumps."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megahead.config.training import ScheduleConfig
from megahead.optim import SCHEDULES, learning_rate_ratio

NAMES = list(SCHEDULES)
TOTAL = 200


def schedule(name: str, warmup: int = 20, final: float = 0.1, decay: int = 40) -> ScheduleConfig:
    decay_steps = decay if name == "wsd" else None
    return ScheduleConfig(name=name, warmup_steps=warmup, final_ratio=final, decay_steps=decay_steps)


def curve(config: ScheduleConfig, total: int = TOTAL) -> list[float]:
    return [learning_rate_ratio(config, step, total) for step in range(total)]


def test_every_name_of_the_setting_has_a_schedule():
    assert set(get_args(ScheduleConfig.model_fields["name"].annotation)) == SCHEDULES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_and_never_zero(name):
    assert curve(schedule(name))[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_the_first_step_is_the_peak(name):
    assert learning_rate_ratio(schedule(name, warmup=0), 0, TOTAL) == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_last_step_and_beyond_have_the_final_ratio(name, beyond):
    final = 1.0 if name == "constant" else 0.1
    assert learning_rate_ratio(schedule(name), TOTAL - 1 + beyond, TOTAL) == pytest.approx(final)


@pytest.mark.parametrize("name", NAMES)
def test_rises_to_the_peak_then_falls_without_jumps(name):
    ratios = curve(schedule(name))
    assert ratios.index(1.0) == 19
    assert ratios[:20] == sorted(ratios[:20])
    assert ratios[19:] == sorted(ratios[19:], reverse=True)
    assert max(abs(after - before) for before, after in itertools.pairwise(ratios)) <= 0.05 + 1e-9


def test_half_way_values():
    middle = 19 + (TOTAL - 1 - 19) // 2
    assert learning_rate_ratio(schedule("triangular", final=0.0), middle, TOTAL) == pytest.approx(0.5)
    assert learning_rate_ratio(schedule("cosine", final=0.2), middle, TOTAL) == pytest.approx(0.6)
    quarter = 19 + (TOTAL - 1 - 19) // 4
    assert learning_rate_ratio(schedule("cosine", final=0.0), quarter, TOTAL) == pytest.approx(0.8535534)


def test_wsd_is_stable_until_its_last_steps():
    ratios = curve(schedule("wsd"))
    assert ratios[19 : TOTAL - 40] == [1.0] * (TOTAL - 40 - 19)
    drops = [before - after for before, after in itertools.pairwise(ratios[-41:])]
    assert drops == pytest.approx([0.9 / 40] * 40)


@given(st.sampled_from(NAMES), st.data())
def test_any_shape_stays_within_its_bounds(name, data):
    total = data.draw(st.integers(1, 60))
    decay = data.draw(st.integers(1, total))
    warmup = data.draw(st.integers(0, total - decay if name == "wsd" else total))
    final = data.draw(st.floats(0, 1, allow_subnormal=False))
    ratios = curve(schedule(name, warmup, final, decay), total)
    low = min([final, *(1 / warmup for _ in range(warmup > 0))])
    assert all(low - 1e-9 <= ratio <= 1 for ratio in ratios)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("share", "total", "steps"), [(0.1, TOTAL, 20), (0.07, 100, 7), (0.01, 20, 0), (0.9, 1, 1)])
def test_a_share_of_warmup_is_that_many_steps_of_any_run(name: str, share: float, total: int, steps: int) -> None:
    decay = 1 if name == "wsd" else None
    shared, counted = (ScheduleConfig(name=name, warmup_steps=given, decay_steps=decay) for given in (share, steps))
    assert shared.num_warmup_steps(total) == steps
    assert curve(shared, total) == curve(counted, total)


def test_a_share_of_decay_follows_the_length_of_the_run() -> None:
    shared = ScheduleConfig(name="wsd", decay_steps=0.25)
    for total in (40, 400):
        assert curve(shared, total) == curve(ScheduleConfig(name="wsd", decay_steps=total // 4), total)
    assert curve(ScheduleConfig(name="wsd", decay_steps=0.01), 30) == pytest.approx([1.0] * 29 + [0.1])


@pytest.mark.parametrize("given", [1.5, -0.1, -1])
def test_other_shares_of_warmup_are_refused(given: float) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig(warmup_steps=given)
    assert repr(ScheduleConfig(warmup_steps=1.0).warmup_steps) == "1"
