"""The phases of a run whose objective changes on the way: each is an ordinary run, which the next one goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megahead.config.idle import without_idle
from megahead.config.run import RunConfig


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run that learn by one objective."""

    config: RunConfig
    """The run's, but for the objective and the direction of attention, which are those of these steps alone, and
    without what nothing reads then; what checkpoints of the phase hold."""

    steps: range
    """By the number of steps that were applied before each."""


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """In their order; a run without `objective.schedule` is one phase.

    All weights and the optimizer's state go from a phase to the next. Rows of the embedding are sharded round-robin no
    longer where all ids compete: each moves at each step.
    """
    steps, schedule = config.training.steps, config.objective.schedule
    if schedule is None:
        return (Phase(config, range(steps)),)
    bounds = sorted({0, schedule.causal_until(steps), schedule.vanilla_from(steps), steps})
    return tuple(Phase(_config_from(config, start), range(start, stop)) for start, stop in pairwise(bounds))


def names_of(phases: Sequence[Phase]) -> list[str]:
    """What each learns: the objective, and which tokens where these are not the same in all."""
    turns = len({phase.config.model.is_causal for phase in phases}) > 1
    return [_name(phase.config, turns) for phase in phases]


def phase_at(config: RunConfig, step: int) -> Phase:
    """The phase in which a run goes on after `step` applied steps; the last one after its end."""
    phases = phases_of(config)
    return next((phase for phase in phases if step < phase.steps.stop), phases[-1])


def phase_that_saved(config: RunConfig, saved: RunConfig) -> Phase:
    """The phase of `config` that learns as `saved`, the config of a checkpoint; the first one where none does."""
    phases = phases_of(config)
    return next((phase for phase in phases if learn_alike(phase.config, saved)), phases[0])


def learn_alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether two phases of a run have the same objective and direction of attention: whether they are the same."""
    return one.objective.name == other.objective.name and one.model.is_causal == other.model.is_causal


def _name(config: RunConfig, turns: bool) -> str:
    objective = config.objective
    kind = f" ({'tied' if objective.tied else 'untied'}, with a bias)" if objective.output_bias else ""
    tokens = f" on {'next' if config.model.is_causal else 'masked'} tokens" if turns else ""
    return f"{objective.name}{kind}{tokens}"


def _config_from(config: RunConfig, step: int) -> RunConfig:
    """That of the phase which begins after `step` steps of a run with a schedule."""
    schedule, steps = config.objective.schedule, config.training.steps
    assert schedule is not None
    changes: dict[str, object] = {"objective": config.objective.begun()}
    if step < schedule.causal_until(steps):
        changes["model"] = config.model.model_copy(update={"is_causal": True})
    if schedule.vanilla_share is not None and step >= schedule.vanilla_from(steps):
        changes["objective"] = config.objective.ended()
        changes["engine"] = config.engine.model_copy(update={"embedding": "dense"})
    return without_idle(config.model_copy(update=changes))
