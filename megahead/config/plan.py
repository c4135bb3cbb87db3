"""The plan of a run: its phases, and its split over ranks with DeepSpeed's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megahead.config.base import find_referenced_file, require, unknown_setting_message
from megahead.config.embedding import shards_embedding
from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.run import RunConfig, reset_unused
from megahead.config.token_subsets import subset_layers
from megahead.errors import UserError


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run with one objective. Each phase continues from the checkpoint of the previous one."""

    config: RunConfig
    """The run's config with the objective and `model.is_causal` of these steps, and defaults for unused settings; saved
    in checkpoints of the phase."""

    steps: range
    """Step numbers from 0."""


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run in order; a run without `objective.schedule` has one.

    All weights and optimizer states pass from one phase to the next. In a vanilla phase the embedding is dense, since
    every row is updated at each step.
    """
    steps, schedule = config.training.steps, config.objective.schedule
    if schedule is None:
        return (Phase(config, range(steps)),)
    bounds = sorted({0, schedule.causal_steps(steps), schedule.vanilla_start(steps), steps})
    return tuple(Phase(_phase_config(config, start), range(start, stop)) for start, stop in pairwise(bounds))


def phase_names(phases: Sequence[Phase]) -> list[str]:
    """The objective of each phase, with its targets (next or masked tokens) if they differ between phases."""
    mixed_targets, names = len({phase.config.model.is_causal for phase in phases}) > 1, []
    for config in (phase.config for phase in phases):
        objective = config.objective
        head = f" ({'tied' if objective.tied else 'untied'}, with a bias)" if objective.output_bias else ""
        targets = f" on {'next' if config.model.is_causal else 'masked'} tokens" if mixed_targets else ""
        names.append(f"{objective.name}{head}{targets}")
    return names


def phase_at(config: RunConfig, step: int) -> Phase:
    """The phase that contains `step`; the last one after the end of the run."""
    phases = phases_of(config)
    return next((phase for phase in phases if step < phase.steps.stop), phases[-1])


def matching_phase(config: RunConfig, saved: RunConfig) -> Phase:
    """The phase of `config` with the objective of `saved`, a checkpoint's config; the first one if none matches."""
    phases = phases_of(config)
    return next((phase for phase in phases if same_objective(phase.config, saved)), phases[0])


def same_objective(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configs of phases have the same objective and the same `model.is_causal`."""
    return one.objective.name == other.objective.name and one.model.is_causal == other.model.is_causal


def _phase_config(config: RunConfig, step: int) -> RunConfig:
    """The config of the phase that starts at `step` in a run with a schedule."""
    schedule, steps = config.objective.schedule, config.training.steps
    assert schedule is not None
    changes: dict[str, object] = {"objective": config.objective.first_phase()}
    if step < schedule.causal_steps(steps):
        changes["model"] = config.model.model_copy(update={"is_causal": True})
    if schedule.vanilla_share is not None and step >= schedule.vanilla_start(steps):
        changes["objective"] = config.objective.last_phase()
        changes["engine"] = config.engine.model_copy(update={"embedding": "dense"})
    return reset_unused(config.model_copy(update=changes))


# Defaults for DeepSpeed's gradient buckets and their communication, by device. They change speed, not results.
#
# Values for CPUs were measured (docs/research/performance.md). Values for CUDA follow from DeepSpeed 0.19's sources and
# are not measured yet.


_CPU_BUCKET = 500_000
"""Gradients with more elements are reduced in place, without a bucket: on a CPU a copy costs more than another
message."""

_CUDA_BUCKET = 50_000_000
"""100 MB in bf16: large enough for the links' full bandwidth, and only the last bucket is sent after the backward pass.
With buckets of a few MB the host could not run far ahead of the device."""


def communication_settings(zero: Mapping[str, Any], device: str, precision: str, data_ranks: int) -> dict[str, Any]:
    """Defaults for a DeepSpeed JSON with the section `zero_optimization` = `zero`; `device`: cpu or cuda.

    At stage 1 in bf16 DeepSpeed uses no buckets: it sums gradients in one fp32 tensor and reduces that at the end.
    """
    stage = zero.get("stage", 0)
    section: dict[str, Any] = {"reduce_bucket_size": _CUDA_BUCKET if device == "cuda" else _CPU_BUCKET}
    if stage in (1, 2):  # at stage 3 DeepSpeed overlaps communication by default
        # `reduce_scatter: true` flattens, all-reduces and copies back; it does not scatter. On CUDA gradients are
        # reduced during the backward pass, from separate buffers; without these the host waits for the device at each
        # bucket
        section |= {"overlap_comm": True} if device == "cuda" else {}
        section |= {"contiguous_gradients": device == "cuda", "reduce_scatter": False}
    settings: dict[str, Any] = {"zero_optimization": section}
    if stage == 1 and precision == "bf16" and "offload_optimizer" not in zero and data_ranks == 1:
        settings["communication_data_type"] = "fp32"  # one rank sends nothing: sums need no rounding to bf16 and back
    return settings


_KeyTree = Mapping[str, "_KeyTree | None"]
"""Keys of a JSON object, with those of each section; None: not a section."""


def _keys(text: str) -> dict[str, None]:
    return dict.fromkeys(text.split())


_OFFLOAD = "device nvme_path buffer_count pin_memory"
_STAGE3 = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential"""
_ZERO: _KeyTree = {
    **_keys("stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce"),
    **_keys("allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights"),
    **_keys("elastic_checkpoint sub_group_size ignore_unused_parameters legacy_stage1 round_robin_gradients"),
    **_keys("parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients"),
    **_keys("zero_quantized_nontrainable_weights memory_efficient_linear pipeline_loading_checkpoint"),
    **_keys("override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory"),
    **_keys(_STAGE3),
    **{f"stage3_{name}": None for name in _STAGE3.split()},
    "leaf_module": _keys("classes names name_suffixes"),
    "offload_param": _keys(f"{_OFFLOAD} buffer_size max_in_cpu"),
    "offload_optimizer": _keys(
        f"{_OFFLOAD} pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"
    ),
}
KNOWN_KEYS: _KeyTree = {
    **_keys("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
    **_keys("managed_gradient_accumulation zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    **_keys("communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op"),
    **_keys("steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_python_gc log_level"),
    "zero_optimization": _ZERO,
    "data_types": _keys("grad_accum_dtype"),
    "bf16": _keys("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads")
    | _keys("bf16_optimizer_states"),
    "fp16": _keys("enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale")
    | _keys("consecutive_hysteresis fp16_master_weights_and_grads"),
    "torch_autocast": _keys("enabled dtype lower_precision_safe_modules"),
    "aio": _keys("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "comms_logger": _keys("enabled prof_all prof_ops verbose debug"),
    "timers": {"throughput": _keys("enabled synchronized")},
}
"""Keys of DeepSpeed's JSON that a run may set. A test compares them with the installed DeepSpeed."""

_REMOVED_REASON = "DeepSpeed has removed it"
_REMOVED_KEYS = """nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention
    elasticity graph_harvesting curriculum_learning progressive_layer_drop"""
_PARALLEL_REASON = "`parallel` splits the model, and no model here has experts or stages of a pipeline"
_CHECKPOINT_REASON = "runs save and resume checkpoints of their own, `training.checkpoint_every`"
REFUSED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler"), "runs log into their own folder"
    ),
    "optimizer": "the run's own `optimizer` is used",
    "scheduler": "the run's own `schedule` is used",
    "bfloat16": "engine.precision decides",
    "activation_checkpointing": "`engine.activation_checkpointing` decides",
    "compile": "`engine.compile` decides",
    **dict.fromkeys(("pipeline", "moe", "tensor_parallel", "expert_parallel"), _PARALLEL_REASON),
    **dict.fromkeys(("use_data_before_expert_parallelism", "seq_parallel_communication_data_type"), _PARALLEL_REASON),
    "sequence_parallel_size": _PARALLEL_REASON,
    **dict.fromkeys(("checkpoint", "datastates_ckpt"), _CHECKPOINT_REASON),
    **dict.fromkeys(("data_efficiency", "dataloader_drop_last"), "the run's own `data` and `batch` decide"),
    **dict.fromkeys(("autotuning", "vocabulary_size"), "nothing reads it here; `megahead estimate` plans a run"),
    **dict.fromkeys(("hybrid_engine", "weight_quantization"), "it is for inference"),
    "disable_allgather": "nothing reads it",
    **dict.fromkeys(_REMOVED_KEYS.split(), _REMOVED_REASON),
    "zero_optimization.zenflow": "checkpoints would lack its state",
    "zero_optimization.cpu_offload": 'it is called "offload_optimizer": {"device": "cpu"} now',
    "zero_optimization.cpu_offload_param": 'it is called "offload_param": {"device": "cpu"} now',
    "zero_optimization.cpu_offload_use_pin_memory": "it is called pin_memory in offload_optimizer and offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _CHECKPOINT_REASON,
    **{f"zero_optimization.{key}": _REMOVED_REASON for key in ("mics_shard_size", "mics_hierarchical_params_gather")},
    "zero_optimization.zeropp_loco_param": _REMOVED_REASON,
}
"""Keys of DeepSpeed's JSON that are refused, with the reason."""


def deepspeed_config(run: RunConfig, data_ranks: int, device: str = "cpu") -> dict[str, Any]:
    """The settings passed to DeepSpeed: `engine.deepspeed` plus batch sizes, clipping and precision.

    `engine.deepspeed` may set what the run's config does not, as fp16's dynamic loss scale. Settings of gradient
    communication default to values for `device`. ConfigError if it contradicts the run.
    """
    content = run.engine.deepspeed
    content = read_deepspeed(content) if isinstance(content, str) else content
    _check_keys(content, KNOWN_KEYS)
    stage = zero_stage(content)
    content = _without_unused_offload(content, stage)
    allowed = stage < 3 or run.engine.activation_checkpointing != "selective"
    rule = "be true or false at ZeRO stage 3, where DeepSpeed overwrites saved products"
    require(allowed, "engine.activation_checkpointing", rule, got="`selective`")
    zero = _section(content, "zero_optimization")
    content = _with_defaults(content, communication_settings(zero, device, run.engine.precision, data_ranks))
    # whether each micro-batch is a candidate group, so that a smaller one has fewer candidates
    micro_groups = run.objective.name == "headless" and run.objective.group_samples == "micro_batch"
    derived: dict[str, Any] = {
        "train_batch_size": run.batch.global_size,
        "train_micro_batch_size_per_gpu": run.batch.micro_size,
        "gradient_accumulation_steps": run.batch.accumulation_steps(data_ranks, micro_groups=micro_groups),
        "managed_gradient_accumulation": True,
        "gradient_clipping": run.optimizer.gradient_clipping,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    _require_agreement("", content, derived | {"gradient_allreduce_op": "mean"}, "the run")
    if stage == 3:  # DeepSpeed 0.19 does not multiply a factor back that is the number of data ranks
        _require_agreement("", content, {"gradient_predivide_factor": 1.0}, "ZeRO stage 3")
    zero = _section(content, "zero_optimization")
    _require_agreement("['zero_optimization']", zero, {"compute_grad_norm": True}, "the run")
    for name, required in _precision_sections(run.engine.precision, stage).items():
        section = _section(content, name)
        _require_agreement(f"[{name!r}]", section, required, f"engine.precision={run.engine.precision}")
        derived[name] = section | required
    # DeepSpeed's throughput timer makes the host wait for the device twice in every micro-batch
    quiet = {"steps_per_print": 10**9, "timers": {"throughput": {"enabled": False}}}
    ours = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**ours, **quiet, **content, **derived}


def read_deepspeed(name: str, config_file: Path | None = None) -> dict[str, Any]:
    """The content of the JSON file `name` that `config_file` refers to; UserError if it cannot be read."""
    path = find_referenced_file(name, config_file)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_dict_of_unique_keys)
    except OSError as error:
        raise UserError(
            f"`engine.deepspeed` must name a DeepSpeed JSON file, but is {name} instead ({error.strerror})."
        ) from None
    except ValueError as error:
        raise UserError(f"`engine.deepspeed` must name a JSON file, but {name} is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(
            f"`engine.deepspeed` must hold a JSON object, but {name} holds {type(content).__name__} instead."
        )
    return content


def _dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a duplicate key, where Python would take the last value."""
    keys = [key for key, _ in pairs]
    if duplicates := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{duplicates[0]} is given twice")
    return dict(pairs)


def zero_stage(content: dict[str, Any]) -> int:
    """ZeRO stage of a DeepSpeed configuration: 0, 1, 2 or 3."""
    stage = _section(content, "zero_optimization").get("stage", 0)
    valid = not isinstance(stage, bool) and stage in (0, 1, 2, 3)
    require(valid, "engine.deepspeed.zero_optimization.stage", "be 0, 1, 2 or 3", got=stage)
    return int(stage)


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section: dict[str, Any] = content.get(name, {})
    require(isinstance(section, dict), f"engine.deepspeed[{name!r}]", "be a section of settings", got=repr(section))
    return section


def _without_unused_offload(content: dict[str, Any], stage: int) -> dict[str, Any]:
    """`content` without an `offload_optimizer` or `offload_param` that DeepSpeed ignores: null, to the device none (the
    default), or at a ZeRO stage below 1 or 3."""
    zero = dict(_section(content, "zero_optimization"))
    for name, lowest_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        section = zero.get(name)
        no_device = section is None or (isinstance(section, dict) and section.get("device") in (None, "none"))
        if no_device or stage < lowest_stage:
            zero.pop(name, None)
    return content | {"zero_optimization": zero}


def _with_defaults(content: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`content` with missing keys, also those of sections, from `defaults`."""
    sections = {
        name: value | _section(content, name) if isinstance(value, dict) else content.get(name, value)
        for name, value in defaults.items()
    }
    return content | sections


def _check_keys(content: Mapping[str, Any], known: _KeyTree, *parents: str) -> None:
    """Raises ConfigError for a refused key or a value that should be a section, UserError for an unknown key. Ignores
    keys that are switched off."""
    for key, value in content.items():
        path = (*parents, key)
        field = "engine.deepspeed" + "".join(f"[{name!r}]" for name in path)
        off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
        if off and (".".join(path) in REFUSED_KEYS or key in known):
            continue
        reason = REFUSED_KEYS.get(".".join(path))
        require(not reason, field, f"be left out ({reason})", got=value)
        if key not in known:
            raise UserError(_unknown_key_message(["engine.deepspeed", *parents], key, known))
        section = known[key]
        if section is not None and value is not None:
            require(isinstance(value, dict), field, "be a section of settings", got=repr(value))
            _check_keys(value, section, *path)


def _unknown_key_message(parents: list[str], key: str, known: _KeyTree) -> str:
    """The error message for an unknown key; suggests the section that has this key, if any."""
    same_key = [path for path in _key_paths(KNOWN_KEYS, "engine.deepspeed") if path.endswith(f".{key}")]
    if same_key:
        return f"`{'.'.join([*parents, key])}` is not a setting; did you mean `{same_key[0]}`?"
    return unknown_setting_message(parents, key, list(known))


def _key_paths(keys: _KeyTree, prefix: str) -> Iterator[str]:
    for key, section in keys.items():
        yield f"{prefix}.{key}"
        yield from _key_paths(section or {}, f"{prefix}.{key}")


def _require_agreement(section: str, content: dict[str, Any], required: dict[str, Any], source: str) -> None:
    for key, expected in required.items():
        value, rule = content.get(key, expected), f"be left out or agree with {source} ({expected})"
        require(value == expected, f"engine.deepspeed{section}[{key!r}]", rule, got=value, hint="remove it there")


_PRECISION_SECTIONS = ("bf16", "fp16", "torch_autocast")


def _precision_sections(precision: str, stage: int) -> dict[str, dict[str, Any]]:
    """The required settings of DeepSpeed's sections on precision, by section. In every precision gradients of
    micro-batches are summed in fp32 and reduced in the run's dtype, overflows are detected, and master weights and
    moments are fp32.

    At stage 0 DeepSpeed's 16-bit wrappers take an optimizer step with zero gradients when they are constructed, so bf16
    uses autocast.
    """
    supported = stage or precision != "fp16"
    require(supported, "engine.precision", "be fp32 or bf16 at ZeRO stage 0", got="fp16", hint="or use stage 1")
    sections: dict[str, dict[str, Any]] = {name: {"enabled": False} for name in _PRECISION_SECTIONS}
    if precision == "bf16" and stage == 0:
        sections["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision == "bf16":
        fp32_states = {"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
        sections["bf16"] = {"enabled": True, "check_grad_overflow": True, **fp32_states}
    elif precision == "fp16":
        sections["fp16"] = {"enabled": True, "fp16_master_weights_and_grads": False}
    return sections


@dataclass(frozen=True)
class RunPlan:
    """A config on a number of ranks, with the settings derived from both."""

    config: RunConfig
    ranks: int

    data_ranks: int
    """Data-parallel ranks, which split each batch; `ranks` / `data_ranks` are tensor-parallel."""

    deepspeed: dict[str, Any]
    """DeepSpeed's settings: the complete content of its JSON."""

    zero_stage: int
    """What is partitioned over data ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights."""

    device: str = "cuda"
    """Each rank's device: cpu or cuda."""

    precision_was_auto: bool = False
    """Whether `engine.precision` was resolved from `auto`."""

    @staticmethod
    def of(
        config: RunConfig, ranks: int = 1, device: str | None = None, *, precision_was_auto: bool = False
    ) -> RunPlan:
        """Plans `config` on `ranks` ranks. ConfigError if it cannot be split over them or contradicts DeepSpeed's
        settings; UserError if DeepSpeed's file cannot be read.

        `device`: cpu or cuda; by default `engine.device`; `auto` counts as cuda, since most plans for other machines
        are for GPUs.
        """
        data_ranks = config.parallel.data_ranks(ranks)
        device = device or ("cpu" if config.engine.device == "cpu" else "cuda")
        deepspeed = deepspeed_config(config, data_ranks, device)
        return RunPlan(config, ranks, data_ranks, deepspeed, zero_stage(deepspeed), device, precision_was_auto)

    def at_stage(self, stage: int) -> RunPlan:
        """The plan at another ZeRO stage. ConfigError if the config rules it out."""
        content = self.config.engine.deepspeed
        content = read_deepspeed(content) if isinstance(content, str) else content
        content = {name: value for name, value in content.items() if name not in _PRECISION_SECTIONS}  # differ by stage
        zero = {**_section(content, "zero_optimization"), "stage": stage}
        engine = self.config.engine.model_copy(update={"deepspeed": {**content, "zero_optimization": zero}})
        return RunPlan.of(self.config.model_copy(update={"engine": engine}), self.ranks, self.device)

    @property
    def zero(self) -> Mapping[str, Any]:
        """DeepSpeed's section `zero_optimization`."""
        return _section(self.deepspeed, "zero_optimization")

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step on each data rank."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    def group_samples(self, saved: int | None = None) -> int:
        """Samples in a candidate group; `saved`: their number in the checkpoint that is resumed."""
        return resolve_candidate_group_samples(self.config.objective, self.config.batch, self.data_ranks, saved)

    # Whether micro-steps (a micro-batch forward and backward) are captured as CUDA graphs (`engine.graphs`).

    def uses_cuda_graphs(self) -> bool:
        """Whether the run uses graphs: on CUDA micro-steps are captured; on a CPU they only run on static inputs."""
        return self.wants_graphs() and not self.graphs_unsupported_reason()

    def wants_graphs(self) -> bool:
        """Whether the run's config asks for graphs on its device."""
        setting = self.config.engine.graphs
        return self.device == "cuda" if setting == "auto" else setting

    def graphs_unsupported_reason(self) -> str:
        """The reason why a run's micro-steps cannot be captured; empty if they can."""
        config, model, engine, masking = self.config, self.config.model, self.config.engine, self.config.masking
        conditions = {
            "tensor ranks communicate within a micro-step": config.parallel.tensor > 1,
            f"ZeRO {self.zero_stage} communicates within a micro-step": self.zero_stage > 1,
            "each step fetches other rows of the embedding": shards_embedding(config),
            "fp16's loss scale changes": engine.precision == "fp16",
            "dropout draws new masks": max(model.hidden_dropout, model.attention_dropout) > 0,
            "recomputation saves the state of random numbers": bool(engine.activation_checkpointing),
            "an auxiliary objective's sums are read in each micro-step": config.objective.auxiliary() is not None,
            "some layers compute a part of the tokens": bool(subset_layers(config)),
            "adaptive masking counts errors in each micro-step": masking is not None and masking.is_adaptive(),
            "its attention reads lengths on the host": engine.attention == "documents" and self.device == "cuda",
            "DeepSpeed handles gradients in hooks": self._handles_gradients_in_hooks(),
        }
        return next((reason for reason, holds in conditions.items() if holds), "")

    def _handles_gradients_in_hooks(self) -> bool:
        """Whether DeepSpeed's optimizer at stage 1 has hooks on gradients, in which it copies, sums or reduces them."""
        zero, is_bf16 = self.zero, self.config.engine.precision == "bf16"
        if self.zero_stage != 1 or zero.get("offload_optimizer"):
            return self.zero_stage == 1
        if is_bf16:
            return bool(self.deepspeed["bf16"].get("immediate_grad_update"))
        return bool(zero.get("overlap_comm")) or bool(zero.get("contiguous_gradients", True))


def compile_conflict(config: RunConfig, zero_stage: int) -> str:
    """Why the settings keep blocks from being compiled; empty if they do not."""
    if config.parallel.tensor > 1:
        return "tensor ranks communicate within a block"
    if zero_stage == 3:
        return "ZeRO 3 gathers weights within a block"
    if config.engine.activation_checkpointing == "selective":
        return "selective checkpointing looks at operations that a compiled block no longer has"
    return ""
