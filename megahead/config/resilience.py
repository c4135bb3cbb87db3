"""What a run does when something goes wrong, and what a resumed run may do differently."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megahead.config.base import Settings

Policy = Literal["skip", "rollback", "stop"]


class ResumeConfig(Settings):
    """How far a resumed run may differ from the one that wrote its checkpoint."""

    allow: tuple[str, ...] = ()
    """Settings that may differ although they decide what is computed: `optimizer.learning_rate`, a whole section such
    as `schedule`, or other content behind a path, `data.train` or `data.tokenizer`."""


class FaultsConfig(Settings):
    """Steps that go wrong. `skip` leaves the weights as they are and continues with the next samples, `rollback`
    returns to the weights of the last checkpoint and continues with the next samples, `stop` ends the run."""

    bad_step: Policy = "skip"
    """When a loss or the gradient norm is not finite on any rank. (An overflow that only lowers fp16's loss scale is
    always skipped.)"""

    spike: Literal["note", "skip", "rollback", "stop"] = "note"
    """When the loss is far above what was usual; `note` applies the step and prints it."""

    spike_score: float = Field(default=8.0, gt=0)
    """How far: distance to the median of recent losses, in standard deviations estimated from their median absolute
    deviation (taken as 1 % of the median where it is less)."""

    spike_window: int = Field(default=128, ge=16)
    """Recent losses that are looked at; spikes are seen once a quarter of them is there."""

    most_in_a_row: int = Field(default=20, gt=0)
    """Bad steps in a row, or returns to one and the same checkpoint, after which the run ends."""
