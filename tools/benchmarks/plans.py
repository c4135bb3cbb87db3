"""What is timed: an objective, and how its steps are computed."""

from __future__ import annotations

from typing import Literal

from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.errors import FieldError

How = Literal["as it is", "compiled", "whole last block", "muon"]
"""As the config says; compiled besides; an encoder's last block computed for every token, not only for targets; with
Muon for the matrices of blocks."""

Plan = tuple[str, How]
"""Which objective, and how its steps are computed."""

OF_BOTH = ("score", "temperature", "learned_temperature", "replaced_tokens", "phrases")
"""Settings of an objective that are the same where the other one is timed beside it."""


def contending(config: RunConfig, objective: str, how: How) -> RunConfig:
    """`config` with another objective, whose vanilla head is its own where it has one, else tied for an encoder; what
    only one of both objectives knows is left out of the other. A share of targets that moves is its mean."""
    if config.engine.precision == "fp16":
        rule = "be fp32 or bf16 for steps without an engine, which scales fp16's loss"
        raise FieldError("engine.precision", rule, got="fp16")
    if config.objective.schedule is not None:
        hint = "--set objective.schedule=null"
        raise FieldError("objective.schedule", "be left out of steps, each of one phase", got="given", hint=hint)
    tree = config.model_dump(mode="json")
    if config.masking is not None and config.masking.final_rate is not None:
        tree["masking"] |= {"rate": config.masking.rate_at(0.5), "final_rate": None, "rate_course": "linear"}
    tree["engine"]["compile"] = how == "compiled" or config.engine.compile
    if how == "muon":
        tree["optimizer"]["name"] = "muon"
    if objective != config.objective.name:
        tied = objective == "vanilla" and (config.objective.tied or config.model.is_encoder())
        kept = {name: tree["objective"][name] for name in OF_BOTH}
        tree["objective"] = kept | {"name": objective, "tied": tied}
        if config.masking is None or not config.masking.similar_share:
            tree["data"]["nearest_ids"] = None
    return config_from_dict(tree)
