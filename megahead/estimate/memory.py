"""Memory of one rank while it trains, by part, from the config: whether a run fits, and at which ZeRO stage.

What DeepSpeed keeps at each stage was read in its optimizers and measured, phase by phase, on a CPU: the peaks of 21 M
parameters on two ranks are 1.02 to 1.09 times this estimate, in fp32 and bf16. The process itself is not included, nor
memory that an allocator keeps (glibc's: up to all gradients, unless MALLOC_MMAP_THRESHOLD_ is set).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megahead.config import RunConfig, RunPlan, phases_of
from megahead.config.loss_chunks import ON_CPU, ON_GPU
from megahead.estimate.activations import activation_bytes
from megahead.estimate.candidates import candidate_rows, expected_candidates
from megahead.estimate.parameters import (
    attention_matrices,
    detection_head,
    mlp_matrices,
    norm_parameters,
    run_parameters,
)

_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}
"""DeepSpeed's own values, in elements."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank at the peak of a step."""

    weights: float
    """The model's own copy."""

    gradients: float

    optimizer: float
    """fp32 masters and Adam's two moments, or Muon's one."""

    buffers: float
    """Gradients being sent, and weights gathered to compute with."""

    activations: float
    """Kept for the backward pass."""

    loss: float
    """Rows of the candidates, a chunk of scores, and both gradients."""

    table: float = 0.0
    """Where the embedding lies in rows, the rank's rows with their moments, and those of a step."""

    host: float = 0.0
    """Bytes that offloading moved to the host's memory; not in the total."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations + self.loss + self.table


def rank_memory(plan: RunPlan, stage: int | None = None) -> RankMemory:
    """The memory of each rank, at the config's ZeRO stage or at `stage`, in the phase that needs most."""
    phases = [replace(plan, config=phase.config) for phase in phases_of(plan.config)]
    return max((_phase_memory(phase, stage) for phase in phases), key=lambda memory: memory.total)


def _phase_memory(plan: RunPlan, stage: int | None) -> RankMemory:
    config, zero = plan.config, plan.zero
    stage = plan.zero_stage if stage is None else stage
    precision = "fp32" if config.engine.precision == "auto" else config.engine.precision
    weights, gradients, optimizer, buffers = _states(plan, stage, precision)
    orthogonal = _muon_parameters(config)
    optimizer -= 4 * orthogonal / (plan.data_ranks if stage else 1)  # it has one moment
    buffers += 6 * orthogonal  # all in bf16, and updates
    host = optimizer if "offload_optimizer" in zero else 0
    if "offload_param" in zero:
        host, weights = host + weights, 0
    optimizer = 0 if "offload_optimizer" in zero else optimizer
    compute = 4 if precision == "fp32" else 2
    peak = activation_bytes(config, compute), _loss(config, compute), _table(plan)
    return RankMemory(weights, gradients, optimizer, buffers, *peak, host)


def _table(plan: RunPlan) -> float:
    """Weight and moments of the rank's rows, and the step they were last updated at; of a step's rows the copies with
    moments that are brought up to date, and as many rows fetched, with their gradients, sent and summed."""
    config = plan.config
    if not config.in_rows():
        return 0.0
    rows, hidden = config.model.padded_vocab_size(), config.model.hidden_size
    a_row = 4 * {"adamw": 3 * hidden, "adamw_row": 2 * hidden + 1, "adagrad": hidden + 1}[config.optimizer.table.rule]
    targets = config.batch.global_size // plan.data_ranks * config.targets_per_row()
    fetched = expected_candidates(targets, config.model.vocab_size)
    return (a_row + 4) * rows / plan.ranks + (a_row + 4 * 5 * hidden) * fetched


def _muon_parameters(config: RunConfig) -> float:
    """Numbers in the matrices of one tensor rank that Muon moves."""
    if config.optimizer.name != "muon":
        return 0
    in_block = attention_matrices(config.model) + mlp_matrices(config.model)
    generator = config.generator()
    layers = config.trained_model().num_layers + (generator.num_layers if generator else 0)
    return layers * in_block / config.parallel.tensor


def _states(plan: RunPlan, stage: int, precision: str) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, optimizer and buffers at the peak.

    Of two buffers that never exist at the same time only the larger counts; buckets count in full.
    """
    parameters, zero = rank_parameters(plan.config), plan.zero
    share, width = parameters / plan.data_ranks, 4 if precision == "fp32" else 2
    bucket, buckets = _size(zero, "reduce_bucket_size"), 2 if stage < 3 and zero.get("overlap_comm") else 1
    bucket_bytes = (4 if stage == 1 else width) * bucket * buckets if zero.get("contiguous_gradients", True) else 0
    send_copy = 4 * min(parameters, bucket)  # of gradients that are sent together
    if stage == 0:  # autocast keeps weights in bf16 from the forward to the backward pass
        return (
            4 * parameters,
            4 * parameters,
            8 * parameters,
            send_copy + (0 if precision == "fp32" else 2 * parameters),
        )
    separate_fp32_sum = precision == "bf16" and "offload_optimizer" not in zero
    if stage == 1 and separate_fp32_sum:  # gradients (unless freed as they come), their fp32 sum, a bf16 copy to send
        freed = plan.deepspeed.get("bf16", {}).get("immediate_grad_update", False)
        return 2 * parameters, (4 if freed else 6) * parameters, 12 * share, 2 * parameters + send_copy
    if stage == 1:  # the rank's gradients are copied for the optimizer; in fp32 after the others' are freed
        copy = 4 * share if width == 2 else max(0, 8 * share - 4 * parameters)
        return width * parameters, 4 * parameters, 12 * share, copy + bucket_bytes
    if stage == 2:  # a micro-batch's gradients beside their sum; later the gathered weights
        return (
            width * parameters,
            4 * share,
            12 * share,
            max(width * share, width * parameters - 4 * share) + bucket_bytes,
        )
    live = min(parameters, _size(zero, "stage3_max_live_parameters"))
    ahead = min(parameters, _size(zero, "stage3_prefetch_bucket_size"))  # held twice while received
    return width * share, 4 * share, 12 * share, max(width * (live + ahead), 4 * share) + bucket_bytes


def _size(zero: Mapping[str, Any], name: str) -> float:
    """A size in elements; if the setting is no number, the default (DeepSpeed itself refuses the run)."""
    given = zero.get(name)
    return given if isinstance(given, int | float) else _DEFAULTS[name]


def ways_to_need_less(plan: RunPlan, stage: int | None = None) -> list[str]:
    """Settings that would make a rank need less memory, the cheapest first; at another ZeRO `stage` where given."""
    engine, batch, mesh = plan.config.engine, plan.config.batch, plan.config.parallel
    stage = plan.zero_stage if stage is None else stage
    ways = [f"take a higher ZeRO stage in engine.deepspeed (now {stage})"] if stage < 3 else ["take more ranks"]
    if batch.micro_size > 1:
        ways.append(f"lower batch.micro_size (now {batch.micro_size})")
    if not engine.activation_checkpointing:
        ways.append("set engine.activation_checkpointing")
    if mesh.tensor > 1 and not mesh.sequence:
        ways.append("set parallel.sequence")
    ways.append(f"raise parallel.tensor (now {mesh.tensor})")
    if not plan.zero.get("offload_optimizer"):
        ways.append("offload to the host with an *_offload.json")
    return ways


def rank_parameters(config: RunConfig) -> int:
    """Parameters of one tensor rank; norms, biases of row-parallel layers and of tokens, and projections of fewer key
    heads than there are ranks, are held in full by each, and an embedding in rows is none of them."""
    model, tensor = config.trained_model(), config.parallel.tensor
    norm, keys = norm_parameters(model), 2 * model.key_heads() * model.head_size()
    in_block = 2 * norm + model.hidden_size * ((model.attention_bias == "all") + model.mlp_bias)
    in_block += 2 * model.head_size() if model.qk_norm else 0
    in_block += keys * (model.hidden_size + (model.attention_bias != "none")) if model.key_heads() < tensor else 0
    counts, last = run_parameters(config), phases_of(config)[-1].config.objective
    shapes = [model, *([generator] if (generator := config.generator()) else [])]
    held_by_each = sum(shape.num_layers for shape in shapes) * in_block + len(shapes) * norm
    held_by_each += model.padded_vocab_size() if last.output_bias else 0
    held_by_each += detection_head(model) if config.generator() else 0
    beside = counts.embedding if config.in_rows() else 0
    return held_by_each + (counts.total - beside - held_by_each) // tensor


def _loss(config: RunConfig, compute: int) -> float:
    """Bytes of outputs and rows with their gradients, and of a chunk of scores (`objectives.three_products`).

    In half precision outputs, rows and their gradients have `compute` bytes an element, but the rows' gradient 4 more
    while it is added up; residuals stand beside scores, in chunks for GPUs.
    """
    targets = config.batch.micro_size * config.targets_per_row()
    rows = candidate_rows(config) / config.parallel.tensor
    half = compute == 2
    chunk = (ON_GPU if half else ON_CPU).outputs(targets, math.ceil(rows), score_size=4)
    matrices = 2 * compute * (targets + rows) + (4 * rows if half else 0)
    slopes = 4 if config.objective.score == "harmonic" else 0
    return matrices * config.model.hidden_size + ((4 + compute if half else 4) + slopes) * chunk * rows
