"""The rules by which steps are classified, without a run."""

from __future__ import annotations

import math

import pytest
import torch

from megahead.config.training import FaultsConfig
from megahead.engine.engine import StepResult
from megahead.train.faults import Fault, FaultPolicy, gradient_fault, robust_score

USUAL = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02, 2.98, 3.0] * 4


def test_the_score_is_in_standard_deviations_and_single_outliers_do_not_move_it() -> None:
    torch.manual_seed(0)
    normal = (3 + 0.2 * torch.randn(1001)).tolist()
    assert robust_score(3 + 5 * 0.2, normal) == pytest.approx(5, rel=0.1)
    assert robust_score(3 + 5 * 0.2, [*normal, 1e6, 1e6]) == pytest.approx(5, rel=0.1)
    assert robust_score(3.3, [3.0] * 50) == pytest.approx(10)  # 1 % of the median is the least deviation
    assert robust_score(2.0, normal) < 0


def test_losses_that_are_not_finite_are_found_where_they_are() -> None:
    losses_WA = torch.tensor([[3.0, 3.0], [math.nan, 3.0], [3.0, math.inf]])
    assert FaultPolicy(FaultsConfig()).find_loss_fault(losses_WA, []) == Fault("loss not finite", ((1, 0), (2, 1)))


def test_a_spike_needs_enough_to_compare_with() -> None:
    fault_policy, losses_WA = FaultPolicy(FaultsConfig(spike_window=64)), torch.tensor([[3.0, 9.0]])
    assert fault_policy.find_loss_fault(losses_WA, USUAL[:15]) is None
    assert fault_policy.find_loss_fault(losses_WA, USUAL[:16]) == Fault("spike", ((0, 1),))
    assert fault_policy.find_loss_fault(torch.tensor([[3.0, 3.1]]), USUAL) is None


@pytest.mark.parametrize(("policy", "kept"), [("note", False), ("skip", True), ("rollback", True), ("stop", True)])
def test_a_spike_is_kept_back_unless_it_is_only_noted(policy: str, kept: bool) -> None:
    fault_policy = FaultPolicy(FaultsConfig.model_validate({"spike": policy}))
    assert fault_policy.must_skip(Fault("spike", ())) is kept
    assert fault_policy.decide(Fault("spike", ())) == ("apply" if policy == "note" else policy)


def test_only_an_overflow_of_a_scale_that_is_searched_for_is_no_fault() -> None:
    assert gradient_fault(StepResult(1.0, True), True) is None
    assert gradient_fault(StepResult(math.inf, False), True) == Fault("overflow", ())
    assert gradient_fault(StepResult(math.inf, False), False) == Fault("gradients not finite", ())
    stern = FaultPolicy(FaultsConfig(bad_step="stop"))
    assert stern.decide(Fault("overflow", ())) == "skip"
    assert stern.decide(Fault("gradients not finite", ())) == "stop"


def test_a_good_step_ends_a_row_and_a_new_checkpoint_ends_returns() -> None:
    fault_policy, bad = (
        FaultPolicy(FaultsConfig(bad_step="rollback", most_in_a_row=3)),
        Fault("loss not finite", ((0, 0),)),
    )
    told = []
    for saved in (False, True, True, False, False):
        fault_policy.decide(None)
        if saved:
            fault_policy.reset_rollbacks()
        told.append(fault_policy.decide(bad))
    assert told == ["rollback", "rollback", "rollback", "rollback", "stop"]
    assert fault_policy.limit_reached() == "after 3 rollbacks without a save between them"
    skipping = FaultPolicy(FaultsConfig(most_in_a_row=3))
    assert [skipping.decide(fault) for fault in (bad, bad, None, bad, bad, bad)] == [
        "skip", "skip", "apply", "skip", "skip", "stop",
    ]  # fmt: skip


def test_only_the_last_losses_are_remembered() -> None:
    losses = USUAL.copy()
    FaultPolicy(FaultsConfig(spike_window=16)).record_loss(7.0, losses)
    assert losses == [*USUAL[-15:], 7.0]


def test_rollbacks_for_other_reasons_are_counted_too() -> None:
    fault_policy = FaultPolicy(FaultsConfig(most_in_a_row=3))
    assert [fault_policy.may_roll_back() for _ in range(3)] == [True, True, False]
    fault_policy.reset_rollbacks()
    assert fault_policy.may_roll_back()
