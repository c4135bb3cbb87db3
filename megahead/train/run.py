"""Builds all components of a run from its config and the launch, and trains: the file to read first."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import exp
from typing import cast

import torch

from megahead.config.plan import RunPlan, phase_at
from megahead.config.run import RunConfig
from megahead.config.token_subsets import subset_layers
from megahead.data.strategy import ErrorCounts
from megahead.distributed.group import Group, Mesh, has_fast_bf16
from megahead.distributed.launch import Launch, choose_device, distributed_session, stand_by
from megahead.distributed.tensors import TensorSource
from megahead.engine.deepspeed import deepspeed_session
from megahead.engine.engine import Engine, start_engine
from megahead.errors import ArgumentError, ConfigError, UserError
from megahead.estimate import memory_reductions, rank_memory
from megahead.losses.candidates import training_free_bias
from megahead.losses.contrastive import build_objective
from megahead.models.attention_backends import AttentionSpec, choose_backend, is_masked_bf16_faster
from megahead.models.backbone import Backbone
from megahead.models.blocks import CompiledBlocks
from megahead.objectives.auxiliary import auxiliary_kind, training_rows
from megahead.objectives.loader import StepLoader
from megahead.objectives.pretraining import Pretraining, assemble
from megahead.optim import build_optimizer
from megahead.run_folder import RunFolder
from megahead.sharded_embedding.table import owners_of, shard_embedding_
from megahead.train.boards import require_trackers
from megahead.train.datasets import data_fingerprints, is_within, open_datasets, require_same_run
from megahead.train.describe import describe_launches, describe_phases, describe_run
from megahead.train.evaluation import Evaluation, TaskEvaluation
from megahead.train.faults import Ending, FaultPolicy, Health, signal_handlers_restored
from megahead.train.loop import Training, train
from megahead.train.progress import Progress, TrainingState
from megahead.train.saving import Checkpointer
from megahead.train.session import Session, hand_over_replicas, require_shared_folder
from megahead.train.start import ResumePoint, starting_weights
from megahead.train.step import StepMetrics, Utilization, device_name
from megahead.wording import format_gib, format_numbers, format_range, pluralize


@dataclass(frozen=True)
class Run:
    """A run as `pretrain` left it; the same on every rank, but for `interrupted`."""

    folder: RunFolder
    """Exports and evaluations take it. It knows the paths in it: `folder.metrics`, `folder.checkpoints` and so on."""

    step: int
    """Optimizer steps applied in all sessions (launches of the run) together."""

    ending: Ending
    """`finished`, `out of time` (`training.max_seconds`), or `stopped` by a signal or Ctrl-C. Saved in each case, but
    for one that was stopped before its first step."""

    held_out_perplexity: float | None
    """exp(loss) of the last evaluation during training (of masked diffusion an upper bound); None if there was none."""

    interrupted: bool = False
    """Whether it was Ctrl-C (SIGINT) by which this process was asked to stop."""


# Elastic runs: the launcher's ranks that train, and the spare ranks, which wait.
#
# The global batch, the objective and the data order do not depend on the mesh, so a run can resume from its newest
# checkpoint with another number of ranks. torchrun's agents start and stop ranks.


LOST_HOST_SECONDS = 20.0
"""The run continues without a host that has not answered for so long. Else ranks wait `engine.timeout_seconds`."""


def elastic_launch(config: RunConfig, launch: Launch) -> Launch:
    """`launch` with as many ranks as `config` uses; UserError if the ranks could not rendezvous again."""
    if not config.parallel.elastic:
        return launch
    if launch.uses_agent_store:
        raise UserError(
            "`parallel.elastic` needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in every torchrun's environment, but it is "
            "missing, and ranks that meet again would not find each other; export it, or start launch/elastic.sh."
        )
    if launch.ranks_per_node % config.parallel.tensor:
        rule = f"divide the ranks of a node ({launch.ranks_per_node}) under parallel.elastic"
        raise ConfigError("parallel.tensor", rule, got=config.parallel.tensor)
    return launch.with_world_size(config.usable_ranks(launch.world_size), LOST_HOST_SECONDS)


def describe_elastic(plan: RunPlan, launch: Launch) -> list[tuple[str, str]]:
    """The banner's line about spare ranks and restarts."""
    if not plan.config.parallel.elastic:
        return []
    there = launch.world_size + launch.spare_ranks
    parts = [f"{plan.ranks} of {pluralize(there, 'rank')} train"]
    if not launch.restarts_ranks:
        parts.append("nothing starts lost ranks again: torchrun's --max-restarts would, launch/elastic.sh")
    return [("elastic", "; ".join(parts))]


def wait_for_end(config: RunConfig, launch: Launch) -> Run:
    """A spare rank waits until the training ranks end; LostRankError if they fail. Returns the run's result without an
    evaluation."""
    train, there, batch = launch.world_size, launch.world_size + launch.spare_ranks, config.batch
    if launch.rank == train:
        print(
            f"{format_numbers('rank', range(train, there))} {'waits' if launch.spare_ranks == 1 else 'wait'}: "
            f"{pluralize(batch.global_size, 'row')} a step in micro-batches of {batch.micro_size} can be split over "
            f"{train} of {pluralize(there, 'rank')}",
            flush=True,
        )
    with hand_over_replicas(config, launch):
        stand_by(launch, config.engine.timeout_seconds, settings_of(config))
    ending = json.loads(config.folder().ending.read_text(encoding="utf-8"))
    return Run(config.folder(), ending["step"], ending["ending"], None)


_NODE_LOCAL = ("output_dir", "data", "engine.deepspeed", "init", "tasks")
"""Settings that may differ between nodes: paths, and sections with paths."""


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings that must be the same on all ranks."""
    return {name: str(value) for name, value in config.flat().items() if not is_within(name, _NODE_LOCAL)}


# `engine.precision: auto`: the number format in which the ranks' devices multiply fastest.


def resolve_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with `auto` replaced by bf16 if every rank's device is faster so, else fp32. Collective for `auto`."""
    if config.engine.precision != "auto":
        return config
    fast = all(ranks.all_gather_objects(has_fast_bf16(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if fast else "fp32"})
    return config.model_copy(update={"engine": engine})


def describe_precision(plan: RunPlan, device: torch.device) -> list[tuple[str, str]]:
    """The line where `device` computes more slowly in the bf16 that was asked for than in fp32."""
    given = plan.config.engine.precision == "bf16" and not plan.precision_was_auto
    if not given or device.type != "cpu" or has_fast_bf16(device):
        return []
    slow = "this processor does not multiply bf16, and may take many times as long as in fp32"
    return [("warning", f"{slow}; set engine.precision to fp32 or auto")]


@contextmanager
def numeric_settings(deterministic: bool) -> Iterator[None]:
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


_OUT_OF_MEMORY_MESSAGES = (
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",  # no room for its stack
    "std::bad_alloc",
    "overflowed",
)


@contextmanager
def explain_out_of_memory(plan: RunPlan) -> Iterator[None]:
    """Inside the block, running out of memory (the host's or the device's) raises a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        needed = format_gib(rank_memory(plan).total)
        raise UserError(
            f"memory must hold a rank's share of the run, at ZeRO {plan.zero_stage} about {needed}, but does not "
            f"({reason}); {', or '.join(memory_reductions(plan))}."
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError):
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or any(sign in str(error) for sign in _OUT_OF_MEMORY_MESSAGES)


# How a run computes its transformer blocks: the attention backend, and torch.compile.


_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def accelerate_(
    backbone: Backbone, config: RunConfig, device: torch.device, zero_stage: int = 0
) -> list[tuple[str, str]]:
    """Configures `backbone` by `config.engine`; returns the choices as (name, value) lines of the banner.

    ConfigError for an attention backend that does not work on this device.
    """
    model, engine = config.model, config.engine
    local, precision = model.local_layers() > 0, _TYPES[engine.precision]
    masked = is_masked_bf16_faster(device, precision, config.data.sequence_length, model.attention_dropout)
    spec = AttentionSpec(device, precision, model.head_size(), model.attention_dropout, local, masked)
    backend = choose_backend(engine.attention, spec)
    backbone.recompute_blocks = engine.activation_checkpointing
    backbone.set_attention(backend.attend)
    lines = [("attention", f"{backend.name} ({backend.description})")]
    if device.type == "cuda" if engine.compile == "auto" else engine.compile:
        unsupported_reason = _why_not_compiled(config, device, zero_stage)
        lines.append(("compiled", f"no, {unsupported_reason}" if unsupported_reason else _what_is_compiled(config)))
        if not unsupported_reason:
            backbone.compiled = CompiledBlocks()
        if not unsupported_reason and not backend.is_traceable:
            backbone.set_attention(torch.compiler.disable(backend.attend))
    return lines


def _what_is_compiled(config: RunConfig) -> str:
    """Which blocks are compiled: all except those whose shapes change with each batch."""
    plain = [f"{format_range('layer', part.layers)} (shorter rows)" for part in subset_layers(config)]
    auxiliary = config.objective.auxiliary()
    needs_all = config.model.is_causal or config.generator_config() or (auxiliary and auxiliary.needs_all_outputs)
    if config.model.is_encoder() and not needs_all:
        plain.append("the last (masked tokens alone)")
    return f"one block for all layers{' but ' * bool(plain)}{' and '.join(plain)}"


def _why_not_compiled(config: RunConfig, device: torch.device, zero_stage: int) -> str:
    """Why blocks cannot be compiled, if that is known in advance; otherwise empty."""
    if config.parallel.tensor > 1:
        return "tensor ranks communicate within a block"
    if zero_stage == 3:
        return "ZeRO 3 gathers weights within a block"
    if config.engine.activation_checkpointing == "selective":
        return "selective checkpointing looks at operations that a compiled block no longer has"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "there is no C++ compiler"
    return ""


ONE_PROCESS = Launch()


def pretrain(config: RunConfig, launch: Launch = ONE_PROCESS, resume: str = "auto") -> Run:
    """Trains `config` to its end, or until a signal stops it. Every rank of `launch` calls it.

    `launch`: this process alone, or what `distributed.read_launch` makes of a launcher's environment; not used if
    torch.distributed is initialized already. `resume`: `auto` continues from the newest checkpoint in the run's folder
    if there is one, `never` refuses a folder that has one, anything else is the checkpoint to continue from.

    Leaves signal handlers and the process group as they were; what it does change in the process is listed in
    docs/python.md. Raises UserError for what a user can repair.
    """
    if not isinstance(config, RunConfig):
        hint = "load_config makes one of a YAML file"
        raise ArgumentError("config", "be a RunConfig", got=f"a {type(config).__name__}", hint=hint)
    with numeric_settings(config.engine.deterministic), signal_handlers_restored():
        require_trackers(config)
        launch = elastic_launch(config, launch)
        if launch.rank >= launch.world_size:
            return wait_for_end(config, launch)
        device = choose_device(config.engine.device, launch.local_rank)
        with distributed_session(launch, device, config.engine.timeout_seconds, settings_of(config)) as ranks:
            resolved, by_auto = resolve_precision(config, device, ranks), config.engine.precision == "auto"
            plan = RunPlan.of(resolved, ranks.size, device.type, precision_was_auto=by_auto)
            with explain_out_of_memory(plan):
                return _pretrain(plan, launch, ranks, device, resume)


def _pretrain(plan: RunPlan, launch: Launch, ranks: Group, device: torch.device, resume: str) -> Run:
    """Trains phase after phase; each resumes from the checkpoint of the previous one, as a new session would."""
    config, mesh = plan.config, Mesh.build(ranks, plan.config.parallel.tensor)
    world_group, data_group = mesh.world_group.new_gloo_group(), mesh.data_group.new_gloo_group()
    datasets = open_datasets(config, world_group)
    require_shared_folder(config.folder(), world_group)
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
    perplexity = None if state.validation is None else exp(min(state.validation["loss"], 700.0))
    return Run(config.folder(), state.step, ending, perplexity, session.stop.signal == "SIGINT")


def _train_phase(session: Session, start: ResumePoint) -> tuple[Ending, TrainingState]:
    """Trains from `start` to the end of its phase."""
    phase = phase_at(session.plan.config, start.step)
    plan, config = replace(session.plan, config=phase.config), phase.config
    state = _state(session, plan, start)
    loader = _loader(session, config, state)
    weights = starting_weights(config, session.world_group, start.checkpoint)
    engine, lines = build_engine(plan, session.mesh, session.device, weights)
    history = session.history_from(start)
    progress = Progress(phase, engine, state, history, session.data_group, session.world_group)
    if start.checkpoint is not None:
        progress.resume_from(start.checkpoint)
    _set_sampling_bias(config, state, engine, session.device)
    fields = _banner_lines(session, plan, state) + lines + session.describe_copies()
    session.logger.utilization = Utilization.for_device(session.device, plan)
    session.logger.log_session(fields, start, progress)
    training = _training(session, plan, start, progress, loader)
    with closing(engine):
        return train(training), state


def _training(session: Session, plan: RunPlan, start: ResumePoint, progress: Progress, loader: StepLoader) -> Training:
    """The components of the training loop for this phase."""
    config, ranks, uploads = plan.config, session.world_group, session.uploads_from(start, progress.history)
    held_out, tasks, encoder = session.datasets.validation, config.tasks, config.model.is_encoder()
    return Training(
        progress=progress,
        loader=loader,
        step_metrics=_step_metrics(session, progress),
        fault_policy=FaultPolicy(config.faults),
        health=Health(config.faults, progress.engine, ranks, plan.data_ranks),
        logger=session.logger,
        stop=session.stop,
        evaluation=None if held_out is None else Evaluation(config, held_out, session.data_group, session.device),
        tasks=None if tasks is None else TaskEvaluation(tasks, ranks, is_encoder=encoder),
        checkpointer=Checkpointer(progress, session.keep_rules, session.lease, uploads, session.copies),
        device=session.device,
        evaluate_first=start.starts_phase(config) or (start.checkpoint is None and config.init is not None),
    )


def _set_sampling_bias(config: RunConfig, state: TrainingState, engine: Engine, device: torch.device) -> None:
    """Sets the training-free head's constant bias, for an auxiliary objective that samples from all ids."""
    settings, auxiliary = config.objective.auxiliary(), cast(Pretraining, engine.module).auxiliary
    if settings is not None and auxiliary is not None and settings.samples_vocabulary():
        counts_V, targets = state.dataset_counts, state.group_samples * config.targets_per_row()
        bias_V = training_free_bias(config.objective, config.model.vocab_size, counts_V, counts_V, targets)
        auxiliary.sampling_bias_V = None if bias_V is None else bias_V.to(device)


def _step_metrics(session: Session, progress: Progress) -> StepMetrics:
    """The accumulator of the model's metrics. Also passes mispredicted tokens to an adaptive masking strategy."""
    step_metrics = StepMetrics(session.world_group, session.mesh.tensor_group.size)
    model, error_counts = cast(Pretraining, progress.engine.module), progress.state.error_counts
    model.on_metrics = step_metrics.record
    model.on_errors = None if error_counts is None else error_counts.record
    return step_metrics


def _state(session: Session, plan: RunPlan, start: ResumePoint) -> TrainingState:
    """The counters of a new run (`resume_from` loads a checkpoint's); CheckpointError for another run's checkpoint."""
    state = TrainingState(plan.config.model.padded_vocab_size(), start.group_samples(plan))
    state.data_fingerprints = data_fingerprints(session.plan.config, session.datasets)
    state.dataset_counts = session.datasets.token_counts
    masking, batch = plan.config.masking, plan.config.batch
    if masking is not None and masking.is_adaptive():
        state.error_counts = ErrorCounts(state.padded_vocab_size, masking.adapt_every, batch.global_size)
    if start.checkpoint is not None:
        require_same_run(start.checkpoint, session.plan.config, state.data_fingerprints)
    return state


def _banner_lines(session: Session, plan: RunPlan, state: TrainingState) -> list[tuple[str, str]]:
    """The banner's lines, except those about the engine."""
    idle = session.launch.slurm_tasks > 1
    tasks = f" (SLURM_NTASKS is {session.launch.slurm_tasks}: srun starts as many ranks)" if idle else ""
    return [
        *describe_run(plan, state.group_samples),
        *describe_phases(session.plan.config),
        *session.datasets.describe(plan.config),
        *describe_elastic(plan, session.launch),
        ("on", f"{plan.ranks} x {device_name(session.device)}{tasks}"),
        *describe_precision(plan, session.device),
        *describe_launches(plan, Utilization.for_device(session.device, plan).device_peak),
    ]


def _loader(session: Session, config: RunConfig, state: TrainingState) -> StepLoader:
    """The data loader of the phase, with process groups of its own."""
    steps_before_masking, settings = session.plan.config.steps_before_masking(), config.objective.auxiliary()
    auxiliary = None if settings is None else auxiliary_kind(settings)
    return StepLoader(
        session.datasets.samples,
        build_objective(config.objective, config.model.vocab_size, state.dataset_counts),
        config.data,
        config.batch,
        session.mesh.data_group.new_gloo_group(),
        group_samples=state.group_samples,
        seed=config.seed,
        device=session.device,
        half=config.engine.precision != "fp32",
        collator=training_rows(config, session.datasets.train, state.error_counts, steps_before_masking),
        counted=None if auxiliary is None else auxiliary.counted,
        owners=owners_of(config, session.mesh),
        sharing=session.mesh.tensor_group,
    )


def build_engine(
    plan: RunPlan, mesh: Mesh, device: torch.device, weights: TensorSource
) -> tuple[Engine, list[tuple[str, str]]]:
    """The engine: the model sharded over the mesh and initialized from `weights`, its optimizer; and banner lines."""
    config = plan.config
    pretraining = assemble(config, mesh.tensor_group, device)
    engine_lines, *_ = [accelerate_(each, config, device, plan.zero_stage) for each in pretraining.encoders()]
    if config.init and config.init.mode in ("probe", "table"):
        pretraining.backbone.requires_grad_(False)
        pretraining.backbone.embedding.requires_grad_(config.init.mode == "table")
    shard_embedding_(pretraining.backbone, config, mesh, device)
    optimizer, arguments = build_optimizer(pretraining, config.optimizer), {"mesh": mesh, "device": device}
    engine = start_engine(pretraining, optimizer=optimizer, config=plan.deepspeed, weights=weights, **arguments)
    return engine, engine_lines
