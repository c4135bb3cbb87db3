"""Builds all parts of a run from its config and the launch, and trains: the file to read first."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import cast

import torch

from megahead.config import RunConfig, RunPlan, phase_at
from megahead.data import Difficulty, training_masker
from megahead.distributed import Group, Launch, Mesh, Tensors, choose_device, connected
from megahead.engine import Engine, RowEngine, deepspeed_session
from megahead.errors import ArgumentError
from megahead.objectives import build_objective, training_free_bias
from megahead.optim import build_optimizer
from megahead.parallel import assemble, place_table_
from megahead.pretraining import Feed, Pretraining
from megahead.train.acceleration import accelerate_
from megahead.train.boards import require_boards
from megahead.train.copier import Copier
from megahead.train.datasets import open_datasets
from megahead.train.describe import describe_phases, describe_run
from megahead.train.elastic import describe_elastic, elastic_launch, settings_of, wait_for_end
from megahead.train.evaluation import Evaluation
from megahead.train.faults import Guard
from megahead.train.health import Health
from megahead.train.identity import data_fingerprints, refuse_another_run
from megahead.train.lineage import Lineage
from megahead.train.loop import train
from megahead.train.numerics import numerics
from megahead.train.out_of_memory import explain_out_of_memory
from megahead.train.precision import settle_precision
from megahead.train.preemption import Ending, signals_put_back
from megahead.train.progress import Progress
from megahead.train.run import Run
from megahead.train.saver import Saver
from megahead.train.session import Session
from megahead.train.shared_folder import must_be_shared
from megahead.train.start import Start
from megahead.train.starting_weights import starting_weights
from megahead.train.state import TrainingState
from megahead.train.tally import Tally
from megahead.train.task_evaluation import TaskEvaluation
from megahead.train.training import Training
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
    if not isinstance(config, RunConfig):
        hint = "load_config makes one of a YAML file"
        raise ArgumentError("config", "be a RunConfig", got=f"a {type(config).__name__}", hint=hint)
    with numerics(config.engine.deterministic), signals_put_back():
        require_boards(config)
        launch = elastic_launch(config, launch)
        if launch.rank >= launch.world_size:
            return wait_for_end(config, launch)
        device = choose_device(config.engine.device, launch.local_rank)
        with connected(launch, device, config.engine.timeout_seconds, settings_of(config)) as ranks:
            settled, by_auto = settle_precision(config, device, ranks), config.engine.precision == "auto"
            plan = RunPlan.of(settled, ranks.size, device.type, precision_by_auto=by_auto)
            with explain_out_of_memory(plan):
                return _pretrain(plan, launch, ranks, device, resume)


def _pretrain(plan: RunPlan, launch: Launch, ranks: Group, device: torch.device, resume: str) -> Run:
    """Phase after phase: the next one resumes what the last one has left, as another session would."""
    config, mesh = plan.config, Mesh.build(ranks, plan.config.parallel.tensor)
    world_group, data_group = mesh.world_group.side_channel(), mesh.data_group.side_channel()
    datasets = open_datasets(config, world_group)
    must_be_shared(config.folder(), world_group)
    session = Session(plan, launch, mesh, device, datasets, world_group, data_group)
    try:
        for start in session.starts(resume):
            with deepspeed_session():
                ending, state = _train_phase(session, start)
            if ending != "finished" or state.step >= config.training.steps:
                break
    except BaseException:
        session.abandon()
        raise
    session.end(ending, state)
    return Run.of(config.folder(), state, ending)


def _train_phase(session: Session, start: Start) -> tuple[Ending, TrainingState]:
    """Trains from `start` to the end of the phase that this is in."""
    phase = phase_at(session.plan.config, start.step)
    plan, config = replace(session.plan, config=phase.config), phase.config
    state = _state(session, plan, start)
    feed = _feed(session, config, state)
    weights = starting_weights(config, session.world_group, start.checkpoint)
    engine, lines = build_engine(plan, session.mesh, session.device, weights)
    lineage = Lineage.of_resumed(start.checkpoint, config.folder())
    progress = Progress(phase, engine, state, lineage, session.data_group, session.world_group)
    if start.checkpoint is not None:
        progress.resume_from(start.checkpoint)
    _set_head_of_draws(config, state, engine, session.device)
    facts = _facts(session, plan, state) + lines + session.describe_copies()
    session.meters_of(plan).banner(facts, start, progress)
    training = _training(session, plan, start, progress, feed)
    with closing(engine):
        return train(training), state


def _training(session: Session, plan: RunPlan, start: Start, progress: Progress, feed: Feed) -> Training:
    """The parts of the phase that the loop works with."""
    config, ranks, mirror = plan.config, session.world_group, session.mirror_from(start, progress.lineage)
    return Training(
        progress=progress,
        feed=feed,
        tally=_tally(session, progress),
        guard=Guard(config.faults),
        health=Health(config.faults, progress.engine, ranks, plan.data_ranks),
        meters=session.meters,
        stop=session.stop,
        evaluation=Evaluation.of(config, session.datasets.validation, session.data_group, session.device),
        tasks=TaskEvaluation.of(config, ranks),
        saver=Saver(progress, session.keep_rules, session.hold, mirror),
        copier=Copier(progress, session.copies),
        device=session.device,
        evaluate_first=start.begins_phase(config) or (start.checkpoint is None and config.init is not None),
    )


def _set_head_of_draws(config: RunConfig, state: TrainingState, engine: Engine, device: torch.device) -> None:
    """The training-free head's bias, by the text's counts: it never moves. For tokens that are drawn from all ids."""
    asked = config.objective.replaced_tokens
    if asked is not None and asked.draws == "vocabulary":
        counts_V, targets = state.dataset_counts, state.group_samples * config.targets_per_row()
        bias_V = training_free_bias(config.objective, config.model.vocab_size, counts_V, counts_V, targets)
        cast(Pretraining, engine.module).drawn_bias_V = None if bias_V is None else bias_V.to(device)


def _tally(session: Session, progress: Progress) -> Tally:
    """Where the model notes what it finds in its batches; which tokens it misses, it tells those who mask by that."""
    tally = Tally(session.world_group, session.mesh.tensor_group.size)
    model, difficulty = cast(Pretraining, progress.engine.module), progress.state.difficulty
    model.note_detection = tally.note
    if model.phrases is not None:
        model.phrases.note = tally.note
    model.note_misses = None if difficulty is None else difficulty.note
    return tally


def _state(session: Session, plan: RunPlan, start: Start) -> TrainingState:
    """The counters of a new run (`resume_from` loads a checkpoint's); CheckpointError for another run's checkpoint."""
    state = TrainingState(plan.config.model.padded_vocab_size(), start.group_samples(plan))
    state.data_fingerprints = data_fingerprints(session.plan.config, session.datasets)
    state.dataset_counts = session.datasets.token_counts
    masking, batch = plan.config.masking, plan.config.batch
    if masking is not None and masking.adapts():
        state.difficulty = Difficulty(state.padded_vocab_size, masking.adapt_every, batch.global_size)
    if start.checkpoint is not None:
        refuse_another_run(start.checkpoint, session.plan.config, state.data_fingerprints)
    return state


def _facts(session: Session, plan: RunPlan, state: TrainingState) -> list[tuple[str, str]]:
    """The banner's lines but for those about the engine."""
    idle = session.launch.job_tasks > 1
    tasks = f" (SLURM_NTASKS is {session.launch.job_tasks}: srun starts as many ranks)" if idle else ""
    return [
        *describe_run(plan, state.group_samples),
        *describe_phases(session.plan.config),
        *session.datasets.describe(plan.config),
        *describe_elastic(plan, session.launch),
        ("on", f"{plan.ranks} x {device_name(session.device)}{tasks}"),
    ]


def _feed(session: Session, config: RunConfig, state: TrainingState) -> Feed:
    """Prepares micro-batches with their candidates; ranks exchange ids over a connection of their own."""
    masked_from = session.plan.config.masked_from()
    return Feed(
        session.datasets.samples,
        build_objective(config.objective, config.model.vocab_size, state.dataset_counts, session.datasets.nearest_ids),
        config.data,
        config.batch,
        session.mesh.data_group.side_channel(),
        group_samples=state.group_samples,
        seed=config.seed,
        device=session.device,
        half=config.engine.precision != "fp32",
        masker=training_masker(config, session.datasets.train, state.difficulty, masked_from),
        owners=session.mesh.world_group.side_channel() if config.in_rows() else None,
        sharing=session.mesh.tensor_group,
    )


def build_engine(
    plan: RunPlan, mesh: Mesh, device: torch.device, weights: Tensors
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
