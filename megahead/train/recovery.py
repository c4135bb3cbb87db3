"""What is done about bad steps, and about replicas of weights that differ: told, rolled back, or the end of the run."""

from __future__ import annotations

from megahead.errors import UserError
from megahead.train.step import StepReport
from megahead.train.training import Training


def handle_fault(run: Training, report: StepReport, first_sample: int) -> None:
    """Does what the config asks for after a bad step, and prints that."""
    action = run.guard.decide(report.fault)
    if report.fault is None:
        return
    state, tensor_size = run.state, run.progress.world_group.size // run.progress.data_group.size
    bad = [(rank, run.feed.samples(first_sample, k, rank // tensor_size)) for rank, k in report.fault.places]
    rows = range(first_sample, first_sample + run.config.batch.global_size)
    state.spikes += report.fault.kind == "spike"
    sentence = run.meters.fault(report, bad or [(None, rows)], action, state)
    if action == "stop":
        raise UserError(
            f"steps must be finite and without spikes, but {sentence}, {run.guard.in_a_row} bad in a row; lower "
            "optimizer.learning_rate or the clipping threshold, use fp32 or bf16, or change `faults`, and resume."
        )
    if action == "rollback":
        _roll_back(run)


def _roll_back(run: Training) -> bool:
    """Goes back to the newest checkpoint; whether there was one."""
    run.saver.wait()
    run.copier.forget()
    reached, folder = run.state.step, run.progress.roll_back()
    run.state.rollbacks += folder is not None
    run.meters.rolled_back(folder, reached - run.state.step, run.state)
    return folder is not None


def replicas_agree(run: Training, *, kept: bool) -> bool:
    """Compares replicas if that is due, as it is where they will be `kept`; where they differ, does what the config
    asks for. Collective."""
    policy = run.config.faults.replicas
    odd = run.health.odd_replica() if run.health.due(run.state.step, kept) else None
    if odd is None:
        return True
    sentence = run.meters.odd_replica(odd, run.health.hosts, policy, run.state)
    if policy == "stop" or (policy == "rollback" and not (run.guard.may_roll_back() and _roll_back(run))):
        raise UserError(
            f"replicas of weights must hold the same bits, but at {sentence}; it is not saved: resume, and test the "
            "memory of that machine."
        )
    return policy == "note"
