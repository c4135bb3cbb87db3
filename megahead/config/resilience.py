"""What a run does when a step goes wrong, and which settings may change when it is resumed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megahead.config.base import Settings

Policy = Literal["skip", "rollback", "stop"]


class ResumeConfig(Settings):
    """How far a resumed run may differ from the one that wrote its checkpoint."""

    allow: tuple[str, ...] = ()
    """Settings that may differ although they change the result: one setting (`optimizer.learning_rate`), a whole
    section (`schedule`), or a path whose files have changed (`data.train`, `data.tokenizer`)."""


class FaultsConfig(Settings):
    """Steps that go wrong. `skip` leaves the weights as they are and continues with the next samples, `rollback`
    returns to the weights of the last checkpoint and continues with the next samples, `stop` ends the run."""

    bad_step: Policy = "skip"
    """When a loss or the gradient norm is not finite on any rank. (An overflow that only lowers fp16's loss scale is
    always skipped.)"""

    spike: Literal["note", "skip", "rollback", "stop"] = "note"
    """When the loss is far above recent losses; `note` applies the step and prints a line."""

    spike_score: float = Field(default=8.0, gt=0)
    """A loss is a spike when it is this many standard deviations above the median of recent losses. The standard
    deviation is estimated from the median absolute deviation, and is at least 1 % of the median."""

    spike_window: int = Field(default=128, ge=16)
    """How many recent losses a loss is compared with. Detection starts once a quarter of that number is recorded."""

    most_in_a_row: int = Field(default=20, gt=0)
    """The run ends after this many bad steps in a row, or this many rollbacks to the same checkpoint."""

    replicas: Literal["note", "rollback", "stop", "off"] = "stop"
    """When weights that several ranks hold are not the same bits on all, as after a fault in memory. Checksums of them
    are compared every `replicas_every` steps and before each checkpoint; `off` compares nothing. After `stop`, the next
    start resumes from a checkpoint that agreed. At ZeRO 1 and 2 each step renews replicas from their owners, so that
    only the last step's faults are seen; at ZeRO 3, and on one data rank, there are no replicas."""

    replicas_every: int = Field(default=100, gt=0)
    """Steps between comparisons of replicas."""

    slow_rank: float = Field(default=2.0, gt=1)
    """A line names a rank whose forward passes take this many times as long as the median of the others'."""
