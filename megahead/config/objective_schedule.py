"""Which objective a run begins and ends with, where that changes on the way."""

from __future__ import annotations

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError


class ObjectiveScheduleConfig(Settings):
    """A run whose objective changes on the way: one set of weights, one state of the optimizer, one learning rate's
    course. With both shares there are two switches."""

    causal_share: float | None = Field(default=None, gt=0, lt=1)
    """encoder: share of training.steps, the first ones, in which it learns as a decoder does, next tokens by causal
    attention; it learns masked tokens in the others, and is an encoder at the end (CLM, then MLM: Gisserot-Boukhlef et
    al. 2025, arXiv 2507.00994)."""

    vanilla_share: float | None = Field(default=None, gt=0, lt=1)
    """headless: share of training.steps, the last ones, with the softmax over the whole vocabulary as objective: a
    trained head at a part of its cost. It starts as the training-free head, so that the loss does not jump: the
    embedding itself (`objective.tied`) or a copy of it, and a bias for each token. The optimizer's state is kept; from
    then on evaluations and exports are those of a vanilla model."""

    @model_validator(mode="after")
    def _has_a_switch(self) -> ObjectiveScheduleConfig:
        if self.causal_share is None and self.vanilla_share is None:
            raise ConfigError("causal_share", "be given, or vanilla_share", got="missing", hint="or leave schedule out")
        return self

    def causal_until(self, steps: int) -> int:
        """How many of a run's `steps` are causal because of the schedule."""
        return 0 if self.causal_share is None else round(self.causal_share * steps)

    def vanilla_from(self, steps: int) -> int:
        """How many of a run's `steps` come before the vanilla softmax; all without it."""
        return steps if self.vanilla_share is None else steps - round(self.vanilla_share * steps)

    def check(self, steps: int) -> None:
        """ConfigError unless each objective has a step."""
        switches = {"causal_share": self.causal_until(steps), "vanilla_share": self.vanilla_from(steps)}
        for name, switch in switches.items():
            share = getattr(self, name)
            if share is not None and not 0 < switch < steps:
                rule = f"leave both objectives a step of training.steps ({steps})"
                raise ConfigError(f"objective.schedule.{name}", rule, got=share)
