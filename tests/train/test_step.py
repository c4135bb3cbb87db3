"""What a step does beside its passes."""

from __future__ import annotations

import traceback

import pytest
import torch

from megahead.train.step import seed_step

CPU = torch.device("cpu")


def test_a_seeded_step_draws_what_torch_seeded_alike_does() -> None:
    seed_step(3, 40, 1, CPU)
    drawn = torch.rand(5)
    torch.manual_seed((3 * 1_000_003 + 40) * 65_537 + 1)
    assert torch.equal(drawn, torch.rand(5))


def test_seeding_a_step_writes_no_stack_down(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(traceback, "format_stack", lambda *_: written.append(1) or [])
    seed_step(1, 0, 0, CPU)
    assert not written
