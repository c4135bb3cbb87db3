"""Which steps of a run learn what."""

from __future__ import annotations

from typing import Any

import pytest

from megahead.config.data import DataConfig
from megahead.config.embedding import shards_embedding
from megahead.config.loading import config_from_checkpoint, config_from_dict
from megahead.config.masking import MaskingConfig
from megahead.config.plan import matching_phase, phase_at, phases_of, same_objective
from megahead.config.run import RunConfig
from megahead.errors import ConfigErrors
from support.good_settings import GOOD

ENCODER: dict[str, Any] = {
    "model": {"size": "modernbert-15m", "vocab_size": 50},
    "masking": {"mask_token": 3, "cls_token": 1, "sep_token": 2},
}


def config(objective: dict[str, Any], **changes: Any) -> RunConfig:
    tree = GOOD | ENCODER | {"objective": objective, "training": {**GOOD["training"], "steps": 20}} | changes
    return config_from_dict(tree)


def told(run: RunConfig) -> list[tuple[str, bool, range]]:
    return [(phase.config.objective.name, phase.config.model.is_causal, phase.steps) for phase in phases_of(run)]


@pytest.mark.parametrize(
    ("schedule", "phases"),
    [
        (None, [("headless", False, range(20))]),
        ({"vanilla_share": 0.2}, [("headless", False, range(16)), ("vanilla", False, range(16, 20))]),
        ({"causal_share": 0.25}, [("headless", True, range(5)), ("headless", False, range(5, 20))]),
        (
            {"causal_share": 0.25, "vanilla_share": 0.2},
            [("headless", True, range(5)), ("headless", False, range(5, 16)), ("vanilla", False, range(16, 20))],
        ),
        (
            {"causal_share": 0.75, "vanilla_share": 0.5},
            [("headless", True, range(10)), ("vanilla", True, range(10, 15)), ("vanilla", False, range(15, 20))],
        ),
        (
            {"causal_share": 0.5, "vanilla_share": 0.5},
            [("headless", True, range(10)), ("vanilla", False, range(10, 20))],
        ),
    ],
)
def test_each_step_has_an_objective_and_a_direction(
    schedule: dict[str, float] | None, phases: list[tuple[str, bool, range]]
) -> None:
    run = config({"schedule": schedule})
    assert told(run) == phases
    for phase in phases_of(run):
        assert all(phase_at(run, step) == phase for step in phase.steps)
        assert matching_phase(run, phase.config) == phase
    assert phase_at(run, 20) == phases_of(run)[-1]


def test_a_vanilla_run_may_begin_causally_and_keeps_its_head() -> None:
    run = config({"name": "vanilla", "tied": True, "schedule": {"causal_share": 0.5}})
    assert told(run) == [("vanilla", True, range(10)), ("vanilla", False, range(10, 20))]
    assert {(phase.config.objective.tied, phase.config.objective.schedule) for phase in phases_of(run)} == {
        (True, None)
    }


def test_the_first_part_of_a_run_that_ends_vanilla_has_no_head() -> None:
    run = config({"tied": True, "schedule": {"causal_share": 0.5, "vanilla_share": 0.25}})
    assert [phase.config.objective.tied for phase in phases_of(run)] == [False, False, True]
    assert [phase.config.objective.output_bias for phase in phases_of(run)] == [False, False, True]


@pytest.mark.parametrize("schedule", [{"vanilla_share": 0.2}, {"causal_share": 0.25}, None], ids=str)
@pytest.mark.parametrize(
    "objective",
    [
        {"bias": "corrected"},
        {"bias": "once", "negatives": 5, "negatives_from": "uniform", "max_candidates": 9, "group_samples": 4},
        {"score": "cosine", "learned_temperature": True},
        {"score": "harmonic", "temperature": 0.1},
    ],
    ids=str,
)
def test_a_phase_is_a_valid_config_of_its_own(objective: dict[str, Any], schedule: dict[str, float] | None) -> None:
    """As which it is read from a checkpoint."""
    both = schedule or {"causal_share": 0.25, "vanilla_share": 0.2}
    for phase in phases_of(config(objective | {"schedule": both})):
        saved = phase.config.model_dump(mode="json")
        assert config_from_dict(saved) == config_from_checkpoint(saved, "a checkpoint") == phase.config


@pytest.mark.parametrize(
    "masking",
    [
        {"diffusion": True},
        {"rate": 0.4, "final_rate": 0.1, "rate_course": "cosine", "count": "bernoulli"},
        {"mask_share": 0.0, "random_share": 0.5, "noise_share": 0.1},
        {"strategy": "span", "span_stop": 0.5, "longest_span": 5},
        {"strategy": "weights"},
    ],
    ids=str,
)
def test_a_causal_phase_says_nothing_of_masks_and_the_others_all(masking: dict[str, Any]) -> None:
    files = {"id_weights": "weights.npy"} if masking.get("strategy") == "weights" else {}
    both = {"causal_share": 0.25, "vanilla_share": 0.2}
    run = config({"schedule": both}, masking=ENCODER["masking"] | masking, data=GOOD["data"] | files)
    causal, *masked = (phase.config for phase in phases_of(run))
    assert causal.masking == MaskingConfig(**ENCODER["masking"])
    assert causal.data == DataConfig(**GOOD["data"])
    for phase in (causal, *masked):
        assert config_from_dict(phase.model_dump(mode="json")) == phase
    assert all((phase.masking, phase.data) == (run.masking, run.data) for phase in masked)


def test_what_nothing_reads_is_left_out_of_what_was_saved_with_it() -> None:
    """Earlier versions named masks and their file in the causal phase as well."""
    causal = phases_of(config({"schedule": {"causal_share": 0.5}}))[0].config
    saved = causal.model_dump(mode="json")
    saved["masking"] |= {"rate": 0.4, "strategy": "weights", "adapt_every": 7}
    saved["data"]["id_weights"] = "weights.npy"
    assert config_from_checkpoint(saved, "a checkpoint") == causal


def test_a_saved_config_ran_and_is_not_held_against_rules_that_came_later() -> None:
    saved = config({}, masking=ENCODER["masking"] | {"strategy": "pmi"}).model_dump(mode="json")
    saved["objective"]["bias"] = "corrected"
    with pytest.raises(ConfigErrors, match=r"`objective\.bias` must be another with"):
        config_from_dict(saved)
    assert config_from_checkpoint(saved, "a checkpoint").objective.bias == "corrected"


def test_phases_differ_in_objective_or_direction_and_in_nothing_else() -> None:
    one, two, three = phases_of(config({"schedule": {"causal_share": 0.25, "vanilla_share": 0.2}}))
    assert not same_objective(one.config, two.config)
    assert not same_objective(two.config, three.config)
    assert same_objective(two.config, two.config.model_copy(update={"seed": 5}))


def test_rows_stay_rows_where_attention_alone_changes() -> None:
    run = config({"schedule": {"causal_share": 0.25, "vanilla_share": 0.2}}, engine={"embedding": "rows"})
    assert [shards_embedding(phase.config) for phase in phases_of(run)] == [True, True, False]


def test_a_framed_row_of_next_tokens_has_a_target_for_each_token_of_its_text() -> None:
    causal, masked = (phase.config for phase in phases_of(config({"schedule": {"causal_share": 0.5}})))
    length = causal.data.sequence_length
    assert causal.sample_length() == masked.sample_length() == length - 3
    assert causal.targets_per_row() == length - 2 > masked.targets_per_row()
