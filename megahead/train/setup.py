"""Builds all parts of a run from its config and the launch, and trains: the file to read first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import cast

import torch

from megahead.checkpoint import Checkpoint
from megahead.config import RunConfig, RunPlan, phase_at
from megahead.data import Difficulty, training_masker
from megahead.distributed import Group, Launch, Mesh, Tensors, choose_device, connected
from megahead.engine import Engine, RowEngine, deepspeed_session
from megahead.objectives import build_objective
from megahead.optim import build_optimizer
from megahead.parallel import assemble, place_table_
from megahead.pretraining import Feed, Pretraining
from megahead.train.acceleration import accelerate_
from megahead.train.boards import require_boards
from megahead.train.copier import Copier
from megahead.train.datasets import open_datasets
from megahead.train.describe import describe_phases, describe_run
from megahead.train.detection_tally import DetectionTally
from megahead.train.elastic import describe_elastic, elastic_launch, settings_of, wait_for_end
from megahead.train.evaluation import Evaluation
from megahead.train.faults import Guard
from megahead.train.health import Health
from megahead.train.identity import data_fingerprints, is_of_another_phase, refuse_another_run
from megahead.train.lineage import Lineage
from megahead.train.loop import Training, train
from megahead.train.mirroring import near_resume
from megahead.train.out_of_memory import explain_out_of_memory
from megahead.train.persistence import agreed_candidate_group_samples, find_resume, resume_from, roll_back
from megahead.train.precision import settle_precision
from megahead.train.preemption import Ending, signals_put_back
from megahead.train.run import Run
from megahead.train.saver import Saver
from megahead.train.session import Session
from megahead.train.shared_folder import must_be_shared
from megahead.train.starting_weights import starting_weights
from megahead.train.state import TrainingState
from megahead.train.task_evaluation import TaskEvaluation
from megahead.train.utilization import device_name

ONE_PROCESS = Launch()


def pretrain(config: RunConfig, launch: Launch = ONE_PROCESS, resume: str = "auto") -> Run:
    """Trains `config` to its end, or until it is stopped; called by every rank of `launch`.

    `launch`: this process alone, or what `distributed.read_launch` makes of a launcher's environment; not used if
    torch.distributed is initialized already. `resume`: `auto` continues from the newest checkpoint in the run's folder
    if there is one, `never` refuses a folder that has one, anything else is the checkpoint to continue from.

    Leaves signal handlers and the process group as they were; what it does change in the process is listed in
    docs/python.md. Raises UserError for what a user can repair.
    """
    with _numerics(config.engine.deterministic), signals_put_back():
        require_boards(config)
        launch = elastic_launch(config, launch)
        if launch.rank >= launch.world_size:
            return wait_for_end(config, launch)
        device = choose_device(config.engine.device, launch.local_rank)
        with connected(launch, device, config.engine.timeout_seconds, settings_of(config)) as ranks:
            plan = RunPlan.of(settle_precision(config, device, ranks), ranks.size, device.type)
            with explain_out_of_memory(plan):
                return _pretrain(plan, launch, ranks, device, resume)


@contextmanager
def _numerics(deterministic: bool) -> Iterator[None]:
    """Inside, only deterministic algorithms if `deterministic`. Denormal numbers are flushed to zero, also afterwards
    (torch cannot report the earlier setting): moments of rare tokens' rows decay to them, and they slow CPUs down.
    Measured, one thread: 20 steps of a fused AdamW on [8192, 128], all first moments denormal: 1.23 s, not 0.35 s."""
    torch.set_flush_denormal(True)
    before = torch.get_deterministic_debug_mode()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _pretrain(plan: RunPlan, launch: Launch, ranks: Group, device: torch.device, resume: str) -> Run:
    """Phase after phase: the next one resumes what the last one has left, as another session would."""
    mesh, folder = Mesh.build(ranks, plan.config.parallel.tensor), plan.config.folder()
    world_group, data_group = mesh.world_group.side_channel(), mesh.data_group.side_channel()
    datasets = open_datasets(plan.config, world_group)
    must_be_shared(folder, world_group)
    resume = near_resume(resume, plan.config, world_group)
    session = Session(plan, launch, mesh, device, datasets, world_group, data_group)
    try:
        for where in chain([resume], repeat("auto")):
            with deepspeed_session():
                ending, state = _train_phase(session, where)
            if ending != "finished" or state.step >= plan.config.training.steps:
                break
    except BaseException:
        session.abandon()
        raise
    session.end(ending, state)
    return Run.of(folder, state, ending)


def _train_phase(session: Session, resume: str) -> tuple[Ending, TrainingState]:
    """Trains from where `resume` says to the end of the phase that this is in."""
    device, world_group, data_group = session.device, session.world_group, session.data_group
    folder, validation = session.plan.config.folder(), session.datasets.validation
    start = find_resume(resume, folder, world_group, session.rescue, session.fetch)
    checkpoint = start.checkpoint
    phase = phase_at(session.plan.config, checkpoint.step if checkpoint else 0)
    plan, config = replace(session.plan, config=phase.config), phase.config
    new_phase = checkpoint is not None and is_of_another_phase(checkpoint, config)
    lineage = Lineage.of_resumed(checkpoint, folder)
    state = _state(session, plan, checkpoint)
    feed = _feed(session, config, state)
    engine, lines = build_engine(plan, session.mesh, device, starting_weights(config, world_group, checkpoint))
    module, tally = cast(Pretraining, engine.module), DetectionTally() if config.generator() else None
    if state.difficulty is not None:
        module.note_misses = state.difficulty.note
    if tally is not None:
        module.note_detection = tally.note
    if checkpoint is not None:
        resume_from(checkpoint, config, engine, state, data_group)
    facts = _facts(session, plan, state) + lines + session.describe_copies()
    meters = session.meters_of(plan)
    meters.banner(facts, state, start, lineage, new_phase=new_phase)
    mirror = session.mirror_from(start, lineage)
    run = Training(
        config=config,
        until=phase.steps.stop,
        evaluate_first=new_phase or (checkpoint is None and config.init is not None),
        engine=engine,
        feed=feed,
        state=state,
        guard=Guard(config.faults),
        health=Health(config.faults, engine, world_group, plan.data_ranks),
        meters=meters,
        stop=session.stop,
        evaluation=None if validation is None else Evaluation(config, validation, data_group, device),
        tasks=TaskEvaluation.of(config, world_group),
        tally=tally,
        saver=Saver(engine, state, config, data_group, world_group, lineage, session.hold, session.switches, mirror),
        copier=Copier(engine, state, config, data_group, world_group, lineage, session.copies),
        mirror=mirror,
        roll_back=partial(roll_back, phase, engine, state, lineage, data_group, world_group),
        device=device,
        data_group=data_group,
        world_group=world_group,
    )
    with closing(engine):
        return train(run), state


def _state(session: Session, plan: RunPlan, checkpoint: Checkpoint | None) -> TrainingState:
    """The counters of a new run (`resume_from` loads a checkpoint's); CheckpointError for another run's checkpoint."""
    state = TrainingState(plan.config.model.padded_vocab_size(), agreed_candidate_group_samples(plan, checkpoint))
    state.data_fingerprints = data_fingerprints(plan.config, session.datasets)
    state.dataset_counts = session.datasets.token_counts
    masking, batch = plan.config.masking, plan.config.batch
    if masking is not None and masking.adapts():
        state.difficulty = Difficulty(state.padded_vocab_size, masking.adapt_every, batch.global_size)
    if checkpoint is not None:
        refuse_another_run(checkpoint, session.plan.config, state.data_fingerprints)
    return state


def _facts(session: Session, plan: RunPlan, state: TrainingState) -> list[tuple[str, str]]:
    """The banner's lines but for those about the engine."""
    of_run = [*describe_phases(session.plan.config), *session.datasets.describe(plan.config)]
    elastic = describe_elastic(plan, session.launch)
    return [
        *describe_run(plan, state.group_samples),
        *of_run,
        *elastic,
        ("on", f"{plan.ranks} x {device_name(session.device)}"),
    ]


def _feed(session: Session, config: RunConfig, state: TrainingState) -> Feed:
    """Prepares micro-batches with their candidates; ranks exchange ids over a connection of their own."""
    return Feed(
        session.datasets.samples,
        build_objective(config.objective, config.model.vocab_size, state.dataset_counts, session.datasets.nearest_ids),
        config.data,
        config.batch,
        session.mesh.data_group.side_channel(),
        group_samples=state.group_samples,
        seed=config.seed,
        device=session.device,
        masker=training_masker(config, session.datasets.train, state.difficulty),
        owners=session.mesh.world_group.side_channel() if config.in_rows() else None,
        sharing=session.mesh.tensor_group,
    )


def build_engine(
    plan: RunPlan,
    mesh: Mesh,
    device: torch.device,
    weights: Tensors,
) -> tuple[Engine, list[tuple[str, str]]]:
    """The model, split over the mesh and filled with `weights`, with its optimizer; and the banner's lines about it."""
    config = plan.config
    pretraining = assemble(config, mesh.tensor_group, device)
    engine_lines, *_ = [accelerate_(each, config, device, plan.zero_stage) for each in pretraining.encoders()]
    if config.init and config.init.mode in ("probe", "table"):
        pretraining.backbone.requires_grad_(False)
        pretraining.backbone.embedding.requires_grad_(config.init.mode == "table")
    in_rows = config.in_rows()
    if in_rows:
        place_table_(pretraining, config, mesh, device)
    optimizer, kind = build_optimizer(pretraining, config.optimizer), RowEngine if in_rows else Engine
    engine = kind(pretraining, optimizer=optimizer, config=plan.deepspeed, mesh=mesh, device=device, weights=weights)
    return engine, engine_lines
