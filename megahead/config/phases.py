"""The phases of a run whose objective changes on the way: each is an ordinary run, which the next one goes on from."""

from __future__ import annotations

from dataclasses import dataclass

from megahead.config.run import RunConfig


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run that learn by one objective."""

    config: RunConfig
    """The run's, but for the objective, which is that of these steps alone; what checkpoints of the phase hold."""

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
    switch = schedule.switch_step(steps)
    begun = config.model_copy(update={"objective": config.objective.first_phase()})
    dense = config.engine.model_copy(update={"embedding": "dense"})
    ended = config.model_copy(update={"objective": config.objective.last_phase(), "engine": dense})
    return Phase(begun, range(switch)), Phase(ended, range(switch, steps))


def phase_at(config: RunConfig, step: int) -> Phase:
    """The phase in which a run goes on after `step` applied steps; the last one after its end."""
    phases = phases_of(config)
    return next((phase for phase in phases if step < phase.steps.stop), phases[-1])


def phase_that_saved(config: RunConfig, objective: str) -> Phase:
    """The phase whose checkpoints name this objective; the first one where none does."""
    phases = phases_of(config)
    return next((phase for phase in phases if phase.config.objective.name == objective), phases[0])
