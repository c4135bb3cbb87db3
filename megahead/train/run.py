"""Builds all components of a run from its config and launch, and trains it: the file to read first."""

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
from torch import nn

from megahead.checkpoints.disk import step_folders
from megahead.checkpoints.store import step_of
from megahead.config.plan import RunPlan, compile_conflict, phase_at
from megahead.config.run import RunConfig
from megahead.config.token_subsets import subset_layers
from megahead.data.strategy import TargetErrorCounts
from megahead.distributed.group import Group, Mesh, has_fast_bf16
from megahead.distributed.launch import Launch, choose_device, distributed_session, stand_by
from megahead.distributed.tensors import TensorSource
from megahead.engine.deepspeed import deepspeed_session
from megahead.engine.engine import Engine, start_engine
from megahead.engine.graphs import describe_graphs
from megahead.errors import ArgumentError, ConfigError, UserError
from megahead.estimate import memory_reductions, rank_memory
from megahead.files import VISIBLE_SECONDS, read_json, wait_until_visible
from megahead.losses.candidates import training_free_bias
from megahead.losses.contrastive import build_objective
from megahead.models.attention_backends import AttentionSpec, choose_backend, is_masked_bf16_faster
from megahead.models.backbone import Backbone
from megahead.models.blocks import CompiledBlocks, set_attention
from megahead.objectives.auxiliary import auxiliary_class, training_row_collator
from megahead.objectives.loader import StepLoader
from megahead.objectives.pretraining import Pretraining, build_parallel_model
from megahead.optim import build_optimizer
from megahead.remote_files import is_remote
from megahead.run_folder import RunFolder
from megahead.sharded_embedding.table import new_planning_group, shard_embedding_
from megahead.train.boards import require_trackers
from megahead.train.datasets import data_fingerprints, is_within, open_datasets, require_same_run
from megahead.train.faults import Ending, FaultPolicy, HealthMonitor, signal_handlers_restored
from megahead.train.loop import Evaluation, TaskEvaluation, Training, train
from megahead.train.preflight import describe_launches, describe_phases, describe_run
from megahead.train.progress import Progress, TrainingState
from megahead.train.saving import Checkpointer
from megahead.train.session import Session, hand_over_replicas, remove_replicas, require_shared_folder
from megahead.train.start import ResumePoint, has_saved, starting_weights
from megahead.train.step import StepMetrics, Utilization, device_name
from megahead.wording import format_gib, format_numbers, format_range, pluralize, print_line


@dataclass(frozen=True)
class Run:
    """The result of `pretrain`; the same on every rank, except `interrupted`, and on spare ranks the perplexity."""

    folder: RunFolder
    """The run's folder, which exports and evaluations take, with its paths: `folder.metrics`, `folder.checkpoints`,
    ..."""

    step: int
    """Optimizer steps applied in all sessions (launches of the run) together."""

    ending: Ending
    """`finished`, `out of time` (`training.max_seconds`), or `stopped` by a signal or Ctrl-C. The run was saved in each
    case, unless it was stopped before its first step."""

    held_out_perplexity: float | None
    """exp(loss) of the last evaluation during training (an upper bound for masked diffusion), or None; None on
    spare ranks."""

    interrupted: bool = False
    """Whether Ctrl-C (SIGINT) stopped this process."""


# Elastic runs: some of the launcher's ranks train, and spare ranks wait.
#
# The global batch, the objective and the data order do not depend on the mesh, so a run can resume from its newest
# checkpoint with another number of ranks. torchrun's agents start and stop ranks.


LOST_HOST_SECONDS = 20.0
"""An elastic run continues without a host after this much silence; other runs wait
`engine.timeout_seconds`."""


def elastic_launch(config: RunConfig, launch: Launch) -> Launch:
    """`launch` with the number of training ranks that `config` can use; UserError if ranks could not reconnect."""
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
    num_training = config.usable_ranks(launch.world_size)
    spare_ranks = launch.world_size - num_training  # they can replace a lost machine
    return replace(launch, world_size=num_training, spare_ranks=spare_ranks, host_timeout_seconds=LOST_HOST_SECONDS)


def describe_elastic(plan: RunPlan, launch: Launch) -> list[tuple[str, str]]:
    """The line about spare ranks and restarts in the banner (the lines printed at the start of a session)."""
    if not plan.config.parallel.elastic:
        return []
    parts = [f"{plan.ranks} of {pluralize(launch.world_size + launch.spare_ranks, 'rank')} train"]
    if not launch.restarts_ranks:
        parts.append("nothing restarts lost ranks; launch/elastic.sh would")
    return [("elastic", "; ".join(parts))]


def wait_for_end(config: RunConfig, launch: Launch, resume: str) -> Run:
    """For a spare rank: waits until the training ranks end, unless the run has ended already, and returns the run's
    result without its perplexity. LostRankError if they fail."""
    num_training, batch, folder = launch.world_size, config.batch, config.folder()
    if (resume == "auto" or has_saved(launch.launch_id, folder)) and _has_finished(config):
        print_line(f"rank {launch.rank} need not wait: the run in {folder} has finished")
        remove_replicas(config)
        return _result_of(folder)
    num_ranks = num_training + launch.spare_ranks
    if launch.rank == num_training:
        spare_ranks = format_numbers("rank", range(num_training, num_ranks))
        print_line(
            f"{spare_ranks} {'waits' if launch.spare_ranks == 1 else 'wait'}: "
            f"{pluralize(batch.global_size, 'row')} a step in micro-batches of {batch.micro_size} can be split over "
            f"{num_training} of {pluralize(num_ranks, 'rank')}"
        )
    with hand_over_replicas(config, launch):
        stand_by(launch, config.engine.timeout_seconds, shared_settings(config, resume))
    wait_until_visible(folder.session_end, VISIBLE_SECONDS)
    return _result_of(folder)


def _has_finished(config: RunConfig) -> bool:
    """Whether the last session took all steps, and no checkpoint was removed since, so that none are to be repeated."""
    folder, steps = config.folder(), config.training.steps
    ending, newest = read_json(folder.session_end), next(iter(step_folders(folder.path)), None)
    return isinstance(ending, dict) and newest is not None and min(ending.get("step", 0), step_of(newest)) >= steps


def _result_of(folder: RunFolder) -> Run:
    ending = json.loads(folder.session_end.read_text(encoding="utf-8"))
    return Run(folder, ending["step"], ending["ending"], None)


_NODE_LOCAL = ("output_dir", "data", "engine.deepspeed", "init", "tasks")
"""Settings that may differ between nodes: paths, and sections with paths."""


def shared_settings(config: RunConfig, resume: str) -> dict[str, str]:
    """The settings that must be the same on all ranks. A folder to resume from may have another path on each node."""
    settings = {name: str(value) for name, value in config.flat().items() if not is_within(name, _NODE_LOCAL)}
    return settings | {"--resume": resume if resume in ("auto", "never") or is_remote(resume) else "a folder"}


def resolve_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with `auto` replaced by bf16 if that is faster on every rank's device, else fp32. Collective for
    `auto`."""
    if config.engine.precision != "auto":
        return config
    is_fast = all(ranks.all_gather_objects(has_fast_bf16(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if is_fast else "fp32"})
    return config.model_copy(update={"engine": engine})


def describe_precision(plan: RunPlan, device: torch.device) -> list[tuple[str, str]]:
    """A warning if the config sets bf16, and `device` is slower in bf16 than in fp32."""
    is_set = plan.config.engine.precision == "bf16" and not plan.precision_was_auto
    if not is_set or device.type != "cpu" or has_fast_bf16(device):
        return []
    problem = "this processor does not multiply bf16, and may take many times as long as in fp32"
    return [("warning", f"{problem}; set engine.precision to fp32 or auto")]


@contextmanager
def numeric_settings(deterministic: bool) -> Iterator[None]:
    """Allows only deterministic algorithms in the block if `deterministic`, and flushes denormal numbers to zero.

    Flushing stays set, since torch cannot report the earlier setting. Moments of rare tokens' rows decay to denormal
    numbers, which are slow on CPUs. Measured (one thread, 20 steps of fused AdamW on [8192, 128]): 1.23 s with all
    first moments denormal, else 0.35 s."""
    torch.set_flush_denormal(True)
    debug_mode = torch.get_deterministic_debug_mode()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(debug_mode)


_OUT_OF_MEMORY_MESSAGES = (
    "too large to convert to C",  # sizes, as an OverflowError
    "into an index-sized integer",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",  # no memory for its stack
    "std::bad_alloc",
    "overflowed",
)


@contextmanager
def explain_out_of_memory(plan: RunPlan) -> Iterator[None]:
    """Turns an out-of-memory error in the block, of the host or the device, into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        required = format_gib(rank_memory(plan).total)
        raise UserError(
            f"memory must hold a rank's share of the run, at ZeRO {plan.zero_stage} about {required}, but does not "
            f"({reason}); {', or '.join(memory_reductions(plan))}."
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def configure_blocks_(
    module: nn.Module, config: RunConfig, device: torch.device, zero_stage: int = 0
) -> list[tuple[str, str]]:
    """Sets attention backend, checkpointing and compilation of all blocks in `module`, including an auxiliary
    objective's, by `config.engine`; returns banner lines. ConfigError for a backend that does not support this
    device."""
    model, engine = config.model, config.engine
    is_local, dtype = model.local_layers() > 0, _DTYPES[engine.precision]
    # whether attention is faster over whole rows with a mask than by document
    prefers_masked = is_masked_bf16_faster(device, dtype, config.data.sequence_length, model.attention_dropout)
    spec = AttentionSpec(device, dtype, model.head_size(), model.attention_dropout, is_local, prefers_masked)
    backend = choose_backend(engine.attention, spec)
    backbones = [part for part in module.modules() if isinstance(part, Backbone)]
    for backbone in backbones:
        backbone.recompute_blocks = engine.activation_checkpointing
    set_attention(module, backend.attend)
    lines = [("attention", f"{backend.name} ({backend.description})")]
    wants_compiled = device.type == "cuda" if engine.compile == "auto" else engine.compile
    if wants_compiled:
        unsupported_reason = _compile_unsupported_reason(config, device, zero_stage)
        lines.append(("compiled", f"no, {unsupported_reason}" if unsupported_reason else _describe_compiled(config)))
        for backbone in backbones if not unsupported_reason else ():
            backbone.compiled = CompiledBlocks()
        if not unsupported_reason and not backend.is_traceable:
            set_attention(module, torch.compiler.disable(backend.attend))
    return lines


def _describe_compiled(config: RunConfig) -> str:
    """Describes the compiled blocks: all except those whose shapes change with each batch."""
    uncompiled = [f"{format_range('layer', part.layers)} (shorter rows)" for part in subset_layers(config)]
    auxiliary = config.objective.auxiliary()
    needs_all = config.model.is_causal or config.generator_config() or (auxiliary and auxiliary.needs_all_outputs)
    if config.model.is_encoder() and not needs_all:
        uncompiled.append("the last (masked tokens alone)")
    return f"one block for all layers{' but ' * bool(uncompiled)}{' and '.join(uncompiled)}"


def _compile_unsupported_reason(config: RunConfig, device: torch.device, zero_stage: int) -> str:
    """The reason why blocks cannot be compiled, as far as known in advance; empty if they can."""
    if conflict := compile_conflict(config, zero_stage):
        return conflict
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "there is no C++ compiler"
    return ""


ONE_PROCESS = Launch()


def pretrain(config: RunConfig, launch: Launch = ONE_PROCESS, resume: str = "auto") -> Run:
    """Trains `config` to its end, or until a signal stops it. Every rank of `launch` must call it.

    `launch`: by default a single process; `distributed.launch.read_launch` reads a launcher's environment. If
    torch.distributed is initialized already, its group trains, by default on torch's current device. `resume`: `auto`
    continues from the newest checkpoint in the run's folder if there is one, `never` raises an error if there is one,
    anything else is the checkpoint to continue from.

    Restores signal handlers and the process group; docs/python.md lists its other effects on the process. Raises
    UserError for errors that a user can fix.
    """
    if not isinstance(config, RunConfig):
        hint = "load_config makes one of a YAML file"
        raise ArgumentError("config", "be a RunConfig", got=f"a {type(config).__name__}", hint=hint)
    with numeric_settings(config.engine.deterministic), signal_handlers_restored():
        require_trackers(config)
        is_default = launch == ONE_PROCESS
        launch = elastic_launch(config, launch)
        if launch.rank >= launch.world_size:
            return wait_for_end(config, launch, resume)
        local_rank = launch.local_rank
        if is_default and config.engine.device != "cpu" and torch.distributed.is_initialized():
            local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
        device = choose_device(config.engine.device, local_rank)
        with distributed_session(
            launch, device, config.engine.timeout_seconds, shared_settings(config, resume)
        ) as ranks:
            resolved, was_auto = resolve_precision(config, device, ranks), config.engine.precision == "auto"
            plan = RunPlan.of(resolved, ranks.size, device.type, precision_was_auto=was_auto)
            with explain_out_of_memory(plan):
                return _pretrain(plan, launch, ranks, device, resume)


def _pretrain(plan: RunPlan, launch: Launch, ranks: Group, device: torch.device, resume: str) -> Run:
    """Trains one phase after the other; each resumes from the checkpoint of the previous one, like a new session."""
    config, mesh = plan.config, Mesh.build(ranks, plan.config.parallel.tensor)
    world_group, data_group = mesh.world_group.new_gloo_group(), mesh.data_group.new_gloo_group()
    datasets = open_datasets(config, world_group)
    require_shared_folder(config.folder(), world_group)
    session = Session(plan, launch, mesh, device, datasets, world_group, data_group)
    try:
        for start in session.resume_points(resume):
            with deepspeed_session():
                ending, state = _train_phase(session, start)
            if ending != "finished" or state.step >= config.training.steps:
                break
        session.end(ending, state)
    except BaseException as error:
        session.close_after_error(error)
        raise
    perplexity = None if state.validation is None else exp(min(state.validation["loss"], 700.0))
    return Run(config.folder(), state.step, ending, perplexity, session.stop.signal == "SIGINT")


def _train_phase(session: Session, start: ResumePoint) -> tuple[Ending, TrainingState]:
    phase = phase_at(session.plan.config, start.step)
    plan, config = replace(session.plan, config=phase.config), phase.config
    state = _build_state(session, plan, start)
    loader = _build_loader(session, plan, state)
    weights = starting_weights(config, session.world_group, start.checkpoint)
    engine, lines = build_engine(plan, session.mesh, session.device, weights)
    history = session.history_from(start)
    groups, launch_id = (session.data_group, session.world_group), session.launch.launch_id
    progress = Progress(phase, engine, state, history, *groups, launch_id)
    if start.checkpoint is not None:
        progress.resume_from(start.checkpoint)
    _set_sampling_bias(config, state, engine, session.device)
    banner = _banner_lines(session, plan, state) + lines + session.describe_replicas()
    session.logger.utilization = Utilization.for_device(session.device, plan)
    session.logger.log_session(banner, start, progress)
    training = _build_training(session, plan, start, progress, loader)
    with closing(engine), training.checkpointer.completing_save():
        return train(training), state


def _build_training(
    session: Session, plan: RunPlan, start: ResumePoint, progress: Progress, loader: StepLoader
) -> Training:
    config, ranks, uploads = plan.config, session.world_group, session.start_uploads(start, progress.history)
    held_out, tasks, is_encoder = session.datasets.held_out, config.tasks, config.model.is_encoder()
    return Training(
        progress=progress,
        loader=loader,
        step_metrics=_build_step_metrics(session, progress),
        fault_policy=FaultPolicy(config.faults),
        health=HealthMonitor(config.faults, progress.engine, ranks, plan.data_ranks),
        logger=session.logger,
        stop=session.stop,
        evaluation=None if held_out is None else Evaluation(config, held_out, session.data_group, session.device),
        tasks=None if tasks is None else TaskEvaluation(tasks, ranks, is_encoder=is_encoder),
        checkpointer=Checkpointer(progress, session.retention_rules, session.lease, uploads, session.replicas),
        device=session.device,
        evaluate_first=start.starts_phase(config) or (start.checkpoint is None and config.init is not None),
    )


def _set_sampling_bias(config: RunConfig, state: TrainingState, engine: Engine, device: torch.device) -> None:
    """Sets the training-free head's constant bias for an auxiliary objective that samples from all ids."""
    settings, auxiliary = config.objective.auxiliary(), cast(Pretraining, engine.module).auxiliary
    if settings is not None and auxiliary is not None and settings.samples_vocabulary():
        counts_V, targets = state.dataset_counts, state.group_samples * config.targets_per_row()
        bias_V = training_free_bias(config.objective, config.model.vocab_size, counts_V, counts_V, targets)
        auxiliary.training_free_bias_V = None if bias_V is None else bias_V.to(device)


def _build_step_metrics(session: Session, progress: Progress) -> StepMetrics:
    """Creates the accumulator of the model's metrics, and sets the model's callbacks for metrics and mispredictions."""
    step_metrics = StepMetrics(session.world_group, session.mesh.tensor_group.size)
    model, target_error_counts = cast(Pretraining, progress.engine.module), progress.state.target_error_counts
    model.on_metrics = step_metrics.record
    model.on_errors = None if target_error_counts is None else target_error_counts.record
    return step_metrics


def _build_state(session: Session, plan: RunPlan, start: ResumePoint) -> TrainingState:
    """The counters of a new run (`resume_from` loads a checkpoint's); CheckpointError for another run's checkpoint."""
    state = TrainingState(plan.config.model.padded_vocab_size(), start.group_samples(plan))
    state.data_fingerprints = data_fingerprints(session.plan.config, session.datasets)
    state.dataset_counts = session.datasets.token_counts
    masking, batch = plan.config.masking, plan.config.batch
    if masking is not None and masking.is_adaptive():
        state.target_error_counts = TargetErrorCounts(state.padded_vocab_size, masking.adapt_every, batch.global_size)
    if start.checkpoint is not None:
        require_same_run(start.checkpoint, session.plan.config, state.data_fingerprints)
    return state


def _banner_lines(session: Session, plan: RunPlan, state: TrainingState) -> list[tuple[str, str]]:
    """The banner's lines, except those about the engine."""
    slurm_tasks = session.launch.slurm_tasks
    note = f" (SLURM_NTASKS is {slurm_tasks}: srun starts as many ranks)" if slurm_tasks > 1 else ""
    device_peak = Utilization.for_device(session.device, plan).device_peak
    return [
        *describe_run(plan, state.group_samples),
        *describe_phases(session.plan.config),
        *session.datasets.describe(plan.config),
        *describe_elastic(plan, session.launch),
        ("on", f"{plan.ranks} x {device_name(session.device)}{note}"),
        *describe_precision(plan, session.device),
        *([] if plan.uses_cuda_graphs() else describe_launches(plan, device_peak)),
    ]


def _build_loader(session: Session, plan: RunPlan, state: TrainingState) -> StepLoader:
    """The data loader of the phase, with its own process group."""
    config = plan.config
    steps_before_masking = session.plan.config.steps_before_masking()
    return StepLoader(
        session.datasets.samples,
        build_objective(config.objective, config.model.vocab_size, state.dataset_counts),
        config.data,
        config.batch,
        session.mesh.data_group.new_gloo_group(),
        group_samples=state.group_samples,
        seed=config.seed,
        device=session.device,
        half_precision=config.engine.precision != "fp32",
        static_shapes=plan.uses_cuda_graphs(),
        collator=training_row_collator(config, session.datasets.train, state.target_error_counts, steps_before_masking),
        auxiliary=auxiliary_class(config.objective.auxiliary_or_empty()),
        # for planning which rows of the embedding each rank fetches
        planning_group=new_planning_group(config, session.mesh),
        tensor_group=session.mesh.tensor_group,
    )


def build_engine(
    plan: RunPlan, mesh: Mesh, device: torch.device, weights: TensorSource
) -> tuple[Engine, list[tuple[str, str]]]:
    """Builds the engine (the model, sharded over the mesh and initialized from `weights`, and its optimizer); returns
    it with banner lines."""
    config = plan.config
    pretraining = build_parallel_model(config, mesh.tensor_group, device)
    engine_lines = configure_blocks_(pretraining, config, device, plan.zero_stage)
    shard_embedding_(pretraining.backbone, config, mesh, device)
    optimizer, arguments = build_optimizer(pretraining, config.optimizer), {"mesh": mesh, "device": device}
    engine = start_engine(pretraining, optimizer=optimizer, config=plan.deepspeed, weights=weights, **arguments)
    if plan.uses_cuda_graphs():
        engine.capture_micro_steps()
    return engine, engine_lines + describe_graphs(plan)
