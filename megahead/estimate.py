"""What a model costs, from its config alone: parameters, floating-point operations, memory. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megahead.config.embedding import sharded_embedding_bytes, shards_embedding
from megahead.config.model import ModelConfig
from megahead.config.objective import CPU_CHUNKS, GPU_CHUNKS
from megahead.config.plan import RunPlan, phases_of
from megahead.config.run import RunConfig
from megahead.config.token_subsets import SubsetLayers, subset_layers


def expected_candidates(targets: int, vocab_size: int) -> int:
    """Unique ids among `targets` tokens of text: 4,300 x (targets / 16,384)^0.62, fitted to English Wikipedia with a
    vocabulary of 50,000 (measured 4.3k, 10.9k, 22k for 16k, 65k, 262k targets)."""
    of_text: float = 4300 * float(targets / 16384) ** 0.62
    return min(targets, vocab_size, round(of_text))


def candidate_rows(config: RunConfig) -> int:
    """Candidate rows in the softmax of one micro-batch."""
    if config.objective.name == "vanilla":
        return config.model.padded_vocab_size()
    return expected_candidates(config.batch.micro_size * config.targets_per_row(), config.model.vocab_size)


# D hidden size, A total width of the query heads (mostly D), K total width of the key heads, F width of the MLP, L
# blocks, V rows of the embedding table (padding included).


@dataclass(frozen=True)
class ParameterCounts:
    """How many numbers a model learns, by part."""

    embedding: int
    """V D."""

    body: int
    """Blocks and final norm: Pythia's "non-embedding parameters", L (4 D^2 + 2 D F + F + 9 D) + 2 D; in a Llama
    L (2 D A + 2 D K + 3 D F + 2 D) + D. In a BERT the embedding's norm, positions and types instead of the final norm;
    in a ModernBERT the embedding's norm instead of the first block's."""

    head: int
    """V D for an untied vanilla head; for a transform and bias D^2 + 3 D + V in a BERT, D^2 + D + V in a ModernBERT;
    V for a bias alone; what an auxiliary objective has; 1 for a learned temperature; else 0."""

    generator: int = 0
    """Of a second encoder beside it: blocks, norms and positions of its own; it has no table."""

    @property
    def total(self) -> int:
        return self.embedding + self.body + self.head + self.generator


def count_parameters(
    config: ModelConfig, *, untied_head: bool = False, mask_head: bool = False, output_bias: bool = False
) -> ParameterCounts:
    """Parameters of `config`'s backbone, and of an output matrix (`untied_head`), an encoder's transform (`mask_head`)
    and a bias for each token (`output_bias`)."""
    hidden, norm = config.hidden_size, norm_parameters(config)
    table = config.padded_vocab_size() * hidden
    blocks = attention_matrices(config) + mlp_matrices(config) + block_biases(config) + 2 * norm
    body = config.num_layers * blocks + norm
    if config.has_learned_positions():
        body += (config.max_positions + config.token_types) * hidden
    transform = hidden**2 + hidden * config.transform_bias + norm + config.padded_vocab_size()
    head = (table if untied_head else 0) + (transform if mask_head else 0)
    head += config.padded_vocab_size() if output_bias else 0
    return ParameterCounts(embedding=table, body=body, head=head)


def attention_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of a block's attention: 2 D A + 2 D K (4 D^2 without grouped queries, if A = D)."""
    return 2 * config.hidden_size * config.head_size() * (config.num_heads + config.key_heads())


def mlp_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of a block's MLP: 2 D F, or 3 D F with a gate."""
    return (3 if config.has_gated_mlp() else 2) * config.hidden_size * config.mlp_size()


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of a norm over D features: a weight, and mostly a bias."""
    return config.hidden_size * (2 if config.has_norm_bias() else 1)


def block_biases(config: ModelConfig) -> int:
    """Biases of a block's projections, plus the weights of its query and key norms."""
    projected = (config.num_heads + 2 * config.key_heads()) * config.head_size()
    biases = {"none": 0, "qkv": projected, "all": projected + config.hidden_size}[config.attention_bias]
    if config.mlp_bias:
        biases += (2 if config.has_gated_mlp() else 1) * config.mlp_size() + config.hidden_size
    return biases + (2 * config.head_size() if config.qk_norm else 0)


def run_parameters(config: RunConfig) -> ParameterCounts:
    """Parameters of what a run trains, in its last phase."""
    objective, encoder = phases_of(config)[-1].config.objective, config.model.is_encoder()
    counts = count_parameters(
        config.model_in_training(),
        untied_head=objective.trains_head(),
        mask_head=encoder and objective.has_mask_head(),
        output_bias=objective.output_bias,
    )
    counts = replace(counts, head=counts.head + objective.learned_temperature)
    generator = config.generator_config()
    body = 0 if generator is None else count_parameters(generator).body
    return replace(counts, generator=body, head=counts.head + _auxiliary_head(config))


def _encoders(config: RunConfig) -> list[ModelConfig]:
    """The shape of what is trained, and that of a generator beside it."""
    generator = config.generator_config()
    return [config.model_in_training(), *([] if generator is None else [generator])]


def _auxiliary_head(config: RunConfig) -> int:
    auxiliary = config.objective.auxiliary()
    return 0 if auxiliary is None else auxiliary.head_parameters(config.model)


# Dense peaks in operations a second, as their makers state them (no sparsity): NVIDIA's data sheets of V100, T4, A10,
# A100, RTX 3090 and 4090, L4, L40S, H100, H200 and B200.


HALF_PRECISION_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""bf16 (fp16 where there is none), by words of the name that torch gives the device; the longest that fits counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations a second that the device can reach; None for one that is not listed, and for fp32."""
    words = set(device_name.replace("-", " ").split())  # "H100 PCIe" fits "NVIDIA H100 PCIe", "A10" not "A100"
    names = [name for name in HALF_PRECISION_PEAKS if words.issuperset(name.split())]
    if precision == "fp32" or not names:
        return None
    return HALF_PRECISION_PEAKS[max(names, key=len)]


def activation_bytes(config: RunConfig, compute: int) -> float:
    """Bytes kept for the backward pass, `compute` for each element.

    Per token, a block keeps its input, two normed inputs and (7 D + 2 F) / t elements. With activation checkpointing
    each block keeps its input alone, and one block at a time all of it; `selective` also keeps 2 D + (4 D + F) / t of
    products and attention. In a Llama these are three inputs and (3 A + 2 K + 4 F) / t, with norms of heads A + K more,
    and 2 D + (2 A + 2 K + 2 F) / t; on a CPU its norms keep their outputs twice. Sequence parallelism divides inputs by
    t too, but gathers one layer's at a time.
    """
    model, tensor = config.model_in_training(), config.parallel.tensor
    tokens = config.batch.micro_size * config.data.sequence_length
    block_input = model.hidden_size / (tensor if config.parallel.sequence else 1)
    heads, mlp = model.num_heads * model.head_size() / tensor, model.mlp_size() / tensor
    keys = max(model.key_heads() / tensor, 1) * model.head_size()
    if model.has_gated_mlp():
        inside, products = (3 + model.qk_norm) * heads + (2 + model.qk_norm) * keys + 4 * mlp, 2 * (heads + keys + mlp)
        block = 4 * block_input + inside
    else:
        block, products = 3 * block_input + 7 * heads + 2 * mlp, 4 * heads + mlp
    recompute = config.engine.activation_checkpointing
    selective = block_input + 2 * model.hidden_size + products
    kept = {False: block, True: block_input, "selective": selective}[recompute]
    working = (block if recompute else 0) + model.hidden_size - block_input
    layers = sum(shape.num_layers for shape in _encoders(config)) - sum(
        part.layers_saved() for part in subset_layers(config)
    )
    return compute * tokens * (layers * kept + working)


# Floating-point operations of training, from the config.
#
# A product of [m, k] and [k, n] takes 2 m k n operations. Backward computes two such products for each of forward's
# (gradients of both factors), so that training is three times the forward pass (Kaplan et al. 2020, arXiv 2001.08361).
# Norms, activations, softmax, lookups and recomputation are not counted. D hidden size, A width of all heads (mostly
# D), F width of the MLP, L blocks, T tokens a row, U candidate rows of the softmax.


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per input token, forward and backward, by part."""

    body: float
    """Matrices of the blocks: 3 * 2 L (4 D^2 + 2 D F), or what a Llama's have."""

    attention: float
    """Scores and weighted sums: 3 * 4 L A * context, where context is the mean number of tokens that a token sees; in
    local layers fewer."""

    head: float
    """Scores of the candidates: 3 * 2 D U, and 2 D U more each where tokens are drawn from them or missed ones are
    counted, 3 * 2 D V beside a vanilla share; and what an auxiliary objective computes of each token."""

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head


def training_flops(
    config: ModelConfig,
    sequence_length: int,
    candidate_rows: int,
    context: float | None = None,
    targets: int | None = None,
    subsets: Sequence[SubsetLayers] = (),
) -> FlopsPerToken:
    """Operations per token of training on rows of `sequence_length` tokens.

    `candidate_rows`: for a vanilla softmax the padded vocabulary, for a headless one the unique targets of a group.
    `context`: mean number of tokens that a token of a global layer sees, itself included; when left out that of rows
    with one document: (T + 1) / 2 for causal attention, else T (isolated documents see less). `targets`: of a row, all
    T when left out; for other tokens the last block of an encoder that sees both sides computes only keys and values.
    Its transform is not counted. `subsets`: an encoder's layers that compute a share of the tokens alone.
    """
    hidden, layers = config.hidden_size, config.num_layers
    attention, mlp = attention_matrices(config), mlp_matrices(config)
    whole_row = (sequence_length + 1) / 2 if config.is_causal else sequence_length
    context = whole_row if context is None else context
    share = 1.0 if targets is None else targets / sequence_length
    saved = 0.0 if config.is_causal else 1 - share
    matrices = layers * (attention + mlp) - saved * (attention / 2 + mlp)
    near = min(context, _seen_within(config.local_window // 2, sequence_length, 1 if config.is_causal else 2))
    seen = [near if config.is_local(layer) else context for layer in range(layers)]
    for part in subsets:  # fewer tokens, each of which sees fewer
        matrices -= part.layers_saved() * (attention + mlp)
        for layer in part.layers:
            seen[layer] = part.share * (near if config.is_local(layer) else part.share * context)
        if part.first_layer_sees_all:  # keys and values of the others, too
            first = part.layers.start
            matrices += (1 - part.share) * attention / 2
            seen[first] = part.share * (near if config.is_local(first) else context)
    return FlopsPerToken(
        body=3 * 2 * matrices,
        attention=3 * 4 * (sum(seen) - saved * seen[-1]) * config.num_heads * config.head_size(),
        head=3 * 2 * hidden * candidate_rows * share,
    )


def run_flops(config: RunConfig, candidate_rows: int) -> FlopsPerToken:
    """Those of a run whose outputs are scored against so many rows; where a generator learns the targets, its own and
    those of the model, which reads all tokens. Of an auxiliary objective the comparisons do not count whose number the
    text decides."""
    length, targets, auxiliary = config.data.sequence_length, config.targets_per_row(), config.objective.auxiliary()
    model, generator, head = config.model_in_training(), config.generator_config(), _scores(config, candidate_rows)
    head += 0.0 if auxiliary is None else auxiliary.head_flops(model)
    if generator is None:
        computed = None if auxiliary is not None and auxiliary.needs_all_outputs else targets
        learned = training_flops(model, length, 0, targets=computed, subsets=subset_layers(config))
        return replace(learned, head=head)
    learned = training_flops(generator, length, 0, targets=targets)
    all_tokens = training_flops(model, length, candidate_rows=0)
    return FlopsPerToken(learned.body + all_tokens.body, learned.attention + all_tokens.attention, head)


def _scores(config: RunConfig, candidate_rows: int) -> float:
    """The scores of targets: three products, one more for what is drawn from them and one for the targets that are
    missed; and of all ids three, where a share of the loss is vanilla, or the one that is drawn from."""
    masking, share = config.masking, config.targets_per_row() / config.data.sequence_length
    auxiliary, products, drawn = config.objective.auxiliary(), 3 + (masking is not None and masking.is_adaptive()), 0
    if auxiliary is not None and auxiliary.samples_tokens:
        drawn = config.model.vocab_size if auxiliary.samples_vocabulary() else candidate_rows
    of_all_ids = 3 * config.model.padded_vocab_size() if config.objective.vanilla_weight else 0
    return share * 2 * config.model.hidden_size * (products * candidate_rows + drawn + of_all_ids)


def _seen_within(reach: int, tokens: int, sides: int) -> float:
    """Mean number of tokens that one of a document of `tokens` sees within `reach` to one or two sides, itself
    included."""
    reach = min(reach, tokens - 1)
    return 1 + sides * (reach - reach * (reach + 1) / (2 * tokens))


# Memory of one rank while it trains, by part, from the config: whether a run fits, and at which ZeRO stage.
#
# What DeepSpeed keeps at each stage was read in its optimizers and measured, phase by phase, on a CPU: the peaks of 21
# M parameters on two ranks are 1.02 to 1.09 times this estimate, in fp32 and bf16. The process itself is not included,
# nor memory that an allocator keeps (glibc's: up to all gradients, unless MALLOC_MMAP_THRESHOLD_ is set).


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
    """A sharded embedding: the rank's rows with their moments, and those of a step."""

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
    targets = config.batch.global_size // plan.data_ranks * config.targets_per_row()
    embedding = sharded_embedding_bytes(config, plan.ranks, expected_candidates(targets, config.model.vocab_size))
    peak = activation_bytes(config, compute), _loss(config, compute), embedding
    return RankMemory(weights, gradients, optimizer, buffers, *peak, host)


def _muon_parameters(config: RunConfig) -> float:
    """Numbers in the matrices of one tensor rank that Muon moves."""
    if config.optimizer.name != "muon":
        return 0
    in_block = attention_matrices(config.model) + mlp_matrices(config.model)
    return sum(shape.num_layers for shape in _encoders(config)) * in_block / config.parallel.tensor


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
        return 4 * parameters, 4 * parameters, 8 * parameters, send_copy + (2 * parameters if width == 2 else 0)
    separate_fp32_sum = precision == "bf16" and "offload_optimizer" not in zero
    if stage == 1 and separate_fp32_sum:  # gradients (unless freed as they come), their fp32 sum, a bf16 copy to send
        freed = plan.deepspeed.get("bf16", {}).get("immediate_grad_update", False)
        return 2 * parameters, (4 if freed else 6) * parameters, 12 * share, 2 * parameters + send_copy
    if stage == 1:  # the rank's gradients are copied for the optimizer; in fp32 after the others' are freed
        copy = 4 * share if width == 2 else max(0, 8 * share - 4 * parameters)
        return width * parameters, 4 * parameters, 12 * share, copy + bucket_bytes
    if stage == 2:  # a micro-batch's gradients beside their sum; later the gathered weights
        largest = max(width * share, width * parameters - 4 * share)
        return width * parameters, 4 * share, 12 * share, largest + bucket_bytes
    live = min(parameters, _size(zero, "stage3_max_live_parameters"))
    ahead = min(parameters, _size(zero, "stage3_prefetch_bucket_size"))  # held twice while received
    return width * share, 4 * share, 12 * share, max(width * (live + ahead), 4 * share) + bucket_bytes


def _size(zero: Mapping[str, Any], name: str) -> float:
    """A size in elements; if the setting is no number, the default (DeepSpeed itself refuses the run)."""
    given = zero.get(name)
    return given if isinstance(given, int | float) else _DEFAULTS[name]


def memory_reductions(plan: RunPlan, stage: int | None = None) -> list[str]:
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
    heads than there are ranks, are held in full by each, and a sharded embedding is none of them."""
    model, tensor = config.model_in_training(), config.parallel.tensor
    norm, keys = norm_parameters(model), 2 * model.key_heads() * model.head_size()
    in_block = 2 * norm + model.hidden_size * ((model.attention_bias == "all") + model.mlp_bias)
    in_block += 2 * model.head_size() if model.qk_norm else 0
    in_block += keys * (model.hidden_size + (model.attention_bias != "none")) if model.key_heads() < tensor else 0
    counts, last = run_parameters(config), phases_of(config)[-1].config.objective
    shapes = _encoders(config)
    held_by_each = sum(shape.num_layers for shape in shapes) * in_block + len(shapes) * norm
    held_by_each += model.padded_vocab_size() if last.output_bias else 0
    held_by_each += _auxiliary_head(config)
    beside = counts.embedding if shards_embedding(config) else 0
    return held_by_each + (counts.total - beside - held_by_each) // tensor


def _loss(config: RunConfig, compute: int) -> float:
    """Bytes of outputs and rows with their gradients, and of a chunk of scores (`losses.fused_softmax`).

    In half precision outputs, rows and their gradients have `compute` bytes an element, but the rows' gradient 4 more
    while it is added up; residuals stand beside scores, in chunks for GPUs.
    """
    targets = config.batch.micro_size * config.targets_per_row()
    rows = candidate_rows(config) / config.parallel.tensor
    half = compute == 2
    chunk = (GPU_CHUNKS if half else CPU_CHUNKS).outputs(targets, math.ceil(rows), score_size=4)
    matrices = 2 * compute * (targets + rows) + (4 * rows if half else 0)
    derivatives = 4 if config.objective.score == "harmonic" else 0
    return matrices * config.model.hidden_size + ((4 + compute if half else 4) + derivatives) * chunk * rows
