"""Parameters, floating-point operations and memory of a run, computed from its config. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megahead.config.embedding import sharded_embedding_bytes, shards_embedding
from megahead.config.model import ModelConfig
from megahead.config.objective import CPU_CHUNKS, GPU_CHUNKS, gpu_score_bytes, resolve_candidate_group_samples
from megahead.config.plan import RunPlan, phases_of
from megahead.config.run import RunConfig
from megahead.config.token_subsets import SubsetLayers, subset_layers


def expected_candidates(targets: int, vocab_size: int) -> int:
    """Unique ids among `targets` tokens of text: 4,300 x (targets / 16,384)^0.62, fitted to English Wikipedia with a
    vocabulary of 50,000 (measured 4.3k, 10.9k, 22k for 16k, 65k, 262k targets)."""
    unique_ids: float = 4300 * float(targets / 16384) ** 0.62
    return min(targets, vocab_size, round(unique_ids))


def candidate_rows(config: RunConfig, data_ranks: int = 1) -> int:
    """Candidates that an output is scored against: those of its candidate group, or the whole vocabulary."""
    return _candidates_of_group(config, config.targets_per_row(), data_ranks)


def _auxiliary_targets(config: RunConfig, candidate_rows: int, data_ranks: int) -> tuple[int, int]:
    """(targets per row that only an auxiliary objective has, candidates that each is scored against). If it shares the
    main objective's candidates, they are the batch's `candidate_rows`."""
    auxiliary = config.objective.auxiliary_or_empty()
    targets = auxiliary.targets_per_row(config.data.sequence_length)
    if auxiliary.shares_candidates:
        return targets, candidate_rows
    return targets, _candidates_of_group(config, targets, data_ranks)


def _candidates_of_group(config: RunConfig, targets_per_row: int, data_ranks: int) -> int:
    """Candidates of one group in one micro-batch: its unique targets, and `objective.negatives` ids drawn in addition,
    by frequency or uniformly; at most `max_candidates` plus the micro-batch's unique targets."""
    objective, vocab_size = config.objective, config.model.vocab_size
    if objective.name == "vanilla":
        return config.model.padded_vocab_size()
    samples = resolve_candidate_group_samples(objective, config.batch, data_ranks)
    is_uniform = objective.negatives_from == "uniform"
    unique = expected_candidates(samples * targets_per_row + objective.negatives * (not is_uniform), vocab_size)
    if is_uniform:
        unique += round((vocab_size - unique) * -math.expm1(objective.negatives * math.log1p(-1 / vocab_size)))
    if objective.max_candidates is None:
        return unique
    in_micro_batch = expected_candidates(min(samples, config.batch.micro_size) * targets_per_row, vocab_size)
    return min(unique, objective.max_candidates + in_micro_batch)


# D hidden size, A total width of the query heads (mostly D), K total width of the key heads, F width of the MLP, L
# blocks, V rows of the padded embedding, t tensor ranks.


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part."""

    embedding: int
    """V D."""

    body: int
    """Blocks and final norm: Pythia's "non-embedding parameters", L (4 D^2 + 2 D F + F + 9 D) + 2 D; in a Llama L (2 D
    A + 2 D K + 3 D F + 2 D) + D. A BERT has no final norm, but an embedding norm, positions and token types. A
    ModernBERT has an embedding norm, and no attention norm in the first block. A GPT-2 also has positions. A Gemma 3
    has twice as many norms."""

    head: int
    """The sum of: V D for an untied vanilla head, or the candidates' own table; D^2 + 3 D + V for a BERT's transform
    and bias, D^2 + D + V for a ModernBERT's; V for a bias alone; 1 for a learned temperature; the parameters of an
    auxiliary objective, except a generator's."""

    generator: int = 0
    """Blocks, norms and positions of an ELECTRA-style generator, which shares the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.body + self.head + self.generator


def body_parameters(config: ModelConfig) -> int:
    """Parameters of a backbone without its embedding, see `ParameterCounts.body`."""
    norm, matrices = norm_parameters(config), attention_matrices(config) + mlp_matrices(config)
    per_block = matrices + block_biases(config) + config.norms_per_block() * norm
    return config.num_layers * per_block + norm + position_parameters(config)


def attention_matrices(config: ModelConfig) -> int:
    """Elements of the matrices of a block's attention: 2 D A + 2 D K (4 D^2 if A = K = D)."""
    return 2 * config.hidden_size * config.head_size() * (config.num_heads + config.key_heads())


def mlp_matrices(config: ModelConfig) -> int:
    """Elements of the matrices of a block's MLP: 2 D F, or 3 D F with a gate."""
    return (3 if config.has_gated_mlp() else 2) * config.hidden_size * config.mlp_size()


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of a norm over D features: a weight, and a bias if it has one."""
    return config.hidden_size * (2 if config.has_norm_bias() else 1)


def position_parameters(config: ModelConfig) -> int:
    """Parameters of the embeddings of positions and token types; 0 without learned positions."""
    return (config.position_rows() + config.token_types) * config.hidden_size if config.has_learned_positions() else 0


def block_biases(config: ModelConfig) -> int:
    """Biases of a block's projections, plus the weights of its query and key norms."""
    projected = (config.num_heads + 2 * config.key_heads()) * config.head_size()
    biases = {"none": 0, "qkv": projected, "all": projected + config.hidden_size}[config.attention_bias]
    if config.mlp_bias:
        biases += (2 if config.has_gated_mlp() else 1) * config.mlp_size() + config.hidden_size
    return biases + (2 * config.head_size() if config.qk_norm else 0)


def run_parameters(config: RunConfig) -> ParameterCounts:
    """Parameters of a run in its last phase, with those that `init.mode` freezes. A mask decoder has further layers
    after an encoder's; they alone see mask tokens, and exports leave them out."""
    model, generator = config.model_with_mask_decoder(), config.generator_config()
    table = model.padded_vocab_size() * model.hidden_size
    head = table * phases_of(config)[-1].config.objective.trains_head() + _replicated_head(config)
    of_generator = 0 if generator is None else body_parameters(generator)
    return ParameterCounts(table, body_parameters(model), head, of_generator)


def _model_configs(config: RunConfig) -> list[ModelConfig]:
    """The configs of the trained model, its mask decoder's layers included, and of its generator, if any."""
    generator = config.generator_config()
    return [config.model_with_mask_decoder(), *([] if generator is None else [generator])]


def _replicated_head(config: RunConfig) -> int:
    """Parameters of `ParameterCounts.head` without the matrix: every tensor rank has all of them."""
    objective, model = phases_of(config)[-1].config.objective, config.model_with_mask_decoder()
    rows, hidden = model.padded_vocab_size(), model.hidden_size
    head = rows * objective.output_bias + objective.learned_temperature
    if model.is_encoder() and objective.has_mask_head():
        head += hidden**2 + hidden * model.transform_bias + norm_parameters(model) + rows
    auxiliary = config.objective.auxiliary_or_empty()
    if (blocks := auxiliary.head_blocks(config.model)) is not None:
        head += body_parameters(blocks) - position_parameters(blocks)
    return head + auxiliary.head_parameters(config.model)


def activation_bytes(config: RunConfig, element_size: int) -> float:
    """Bytes saved for the backward pass, with `element_size` bytes per element.

    Per token a block saves its input, two normed inputs and (7 D + 2 F) / t elements. With activation checkpointing
    each block saves only its input, but the block being recomputed saves everything; `selective` also saves the 2 D +
    (4 D + F) / t outputs of matmuls and attention. A Llama's block saves four inputs (plain and normed) and (3 A + 2 K
    + 4 F) / t elements, with QK norms another A + K; `selective` saves 2 D + (2 A + 2 K + 2 F) / t. On a CPU a Llama's
    norms save their outputs twice. A Gemma 3's block saves two more inputs. Sequence parallelism also divides inputs by
    t, but gathers those of one layer at a time. A frozen block under a frozen embedding saves nothing; under a trained
    one fewer inputs than is counted.
    """
    model, tensor = config.model_with_mask_decoder(), config.parallel.tensor
    tokens = config.batch.micro_size * config.data.sequence_length
    block_input = model.hidden_size / (tensor if config.parallel.sequence else 1)
    heads, mlp = model.num_heads * model.head_size() / tensor, model.mlp_size() / tensor
    keys = max(model.key_heads() / tensor, 1) * model.head_size()
    if model.has_gated_mlp():
        products = 2 * (heads + keys + mlp)
        in_sublayers = (3 + model.qk_norm) * heads + (2 + model.qk_norm) * keys + 4 * mlp
        block = (2 + model.norms_per_block()) * block_input + in_sublayers
    else:
        block, products = 3 * block_input + 7 * heads + 2 * mlp, 4 * heads + mlp
    recompute = config.engine.activation_checkpointing
    selective = block_input + 2 * model.hidden_size + products
    saved_per_layer = {False: block, True: block_input, "selective": selective}[recompute]
    is_frozen = config.freezes_embedding()
    temporary = (block if recompute or is_frozen else 0) + model.hidden_size - block_input
    skipped_layers = sum(subset.skipped_layers() for subset in subset_layers(config))
    layers = 0 if is_frozen else sum(model.num_layers for model in _model_configs(config)) - skipped_layers
    auxiliary_layers = config.objective.auxiliary_or_empty().num_layers * tensor  # each rank has them whole
    return element_size * tokens * (layers * saved_per_layer + auxiliary_layers * block + temporary)


# Floating-point operations of training, from the config.
#
# A product of [m, k] and [k, n] takes 2 m k n operations. The backward pass computes two products for each of the
# forward pass, so training takes three times its operations (Kaplan et al. 2020, arXiv 2001.08361), or twice under
# frozen weights, or one time where nothing before them is trained. Norms, activations, softmax, lookups and
# recomputation are not counted. D hidden size, A total width of the query heads (mostly D), F MLP width, L blocks, T
# tokens per row, U candidates of the softmax.


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per input token, forward and backward, by part."""

    body: float
    """Matrices of the blocks: 3 * 2 L (4 D^2 + 2 D F) in a Pythia."""

    attention: float
    """Scores and weighted sums: 3 * 4 L A * context (the mean number of tokens that a token attends to)."""

    head: float
    """Scores of the candidates: 3 * 2 D U, plus 2 D U to sample tokens from them, 2 D U to find mispredicted targets,
    3 * 2 D V if a vanilla loss is added (`vanilla_weight`), and the head of an auxiliary objective."""

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

    `candidate_rows`: the padded vocabulary for a vanilla softmax, the unique targets of a group for a headless one.
    `context`: mean number of tokens, itself included, that a token attends to in a global layer; by default that of
    rows with one document: (T + 1) / 2 if causal, else T. `targets`: targets of a row, by default all T; for tokens
    without a target a bidirectional encoder's last block computes only keys and values. The transform before an
    encoder's head is not counted. `subsets`: layers of an encoder that compute only a share of the tokens.
    """
    hidden, layers = config.hidden_size, config.num_layers
    attention, mlp = attention_matrices(config), mlp_matrices(config)
    queries = 2 * hidden * config.head_size() * config.num_heads  # the matrices of queries and outputs
    if context is None:
        context = (sequence_length + 1) / 2 if config.is_causal else sequence_length
    share = 1.0 if targets is None else targets / sequence_length
    skipped = 0.0 if config.is_causal else 1 - share
    matrices = layers * (attention + mlp) - skipped * (queries + mlp)
    local = min(context, _mean_window(config.window_radius(), sequence_length, 1 if config.is_causal else 2))
    contexts = [local if config.is_local(layer) else context for layer in range(layers)]
    for subset in subsets:  # fewer queries, each of fewer keys
        matrices -= subset.skipped_layers() * (attention + mlp)
        for layer in subset.layers:
            contexts[layer] = subset.share * (local if config.is_local(layer) else subset.share * context)
        if subset.first_layer_attends_to_all:  # it also computes keys and values of the other tokens
            first = subset.layers.start
            matrices += (1 - subset.share) * (attention - queries)
            contexts[first] = subset.share * (local if config.is_local(first) else context)
    return FlopsPerToken(
        body=3 * 2 * matrices,
        attention=3 * 4 * (sum(contexts) - skipped * contexts[-1]) * config.num_heads * config.head_size(),
        head=3 * 2 * hidden * candidate_rows * share,
    )


def run_flops(config: RunConfig, candidate_rows: int, data_ranks: int = 1) -> FlopsPerToken:
    """Operations per token of a run with `candidate_rows` candidates, a generator's included. Not counted are the
    products of `objective.phrases` (ends of masked phrases with tokens of other rows): it depends on the text how many.
    `data_ranks`: data-parallel ranks."""
    length, targets = config.data.sequence_length, config.targets_per_row()
    auxiliary = config.objective.auxiliary_or_empty()
    model, generator = config.model_with_mask_decoder(), config.generator_config()
    head = _head_flops(config, candidate_rows, data_ranks) + auxiliary.head_flops(model, length)
    if (blocks := auxiliary.head_blocks(model)) is not None:
        head += training_flops(blocks, length, 0).total
    outputs = targets if generator is None and not auxiliary.needs_all_outputs else None
    flops = training_flops(model, length, 0, targets=outputs, subsets=subset_layers(config))
    generator_flops = FlopsPerToken(0, 0, 0)
    if generator is not None:
        generator_flops = training_flops(generator, length, 0, targets=targets)
    if config.freezes_body():  # a product of two activations has no gradient of weights to leave out
        body, attention = (1, 1) if config.freezes_embedding() else (2, 3)
        flops = replace(flops, body=flops.body * body / 3, attention=flops.attention * attention / 3)
    return FlopsPerToken(generator_flops.body + flops.body, generator_flops.attention + flops.attention, head)


def _head_flops(config: RunConfig, candidate_rows: int, data_ranks: int) -> float:
    """See `FlopsPerToken.head`, without an auxiliary objective's own head."""
    masking, share = config.masking, config.targets_per_row() / config.data.sequence_length
    auxiliary = config.objective.auxiliary_or_empty()
    products, sampled = 3 + (masking is not None and masking.is_adaptive()), 0
    if auxiliary.samples_tokens:
        sampled = config.model.vocab_size if auxiliary.samples_vocabulary() else candidate_rows
    vanilla = 3 * config.model.padded_vocab_size() if config.objective.vanilla_weight else 0
    products_per_token = share * (products * candidate_rows + sampled + vanilla)
    targets, candidates = _auxiliary_targets(config, candidate_rows, data_ranks)
    products_per_token += targets / config.data.sequence_length * (3 * candidates + vanilla)
    if auxiliary.has_bag_of_words():  # forward only: the backward pass needs just the largest scores
        products_per_token += candidates + vanilla / 3
    return 2 * config.model.hidden_size * products_per_token


def _mean_window(radius: int, tokens: int, sides: int) -> float:
    """Mean number of tokens within `radius` of a token on one or two sides, itself included, in `tokens` tokens."""
    radius = min(radius, tokens - 1)
    return 1 + sides * (radius - radius * (radius + 1) / (2 * tokens))


# Memory of one rank, by part: whether a run fits, and at which ZeRO stage.
#
# DeepSpeed's buffers at each stage were read in its optimizers and measured on a CPU: the peaks of 21 M parameters on
# two ranks are 1.02 to 1.09 times this estimate, in fp32 and bf16. Not included are the process itself and memory that
# the allocator caches (glibc: up to all gradients, unless MALLOC_MMAP_THRESHOLD_ is set).


_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}
"""DeepSpeed's defaults, in elements."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank at the peak of a step."""

    weights: float
    """The model's own copy."""

    gradients: float

    optimizer: float
    """fp32 masters and Adam's two moments, or Muon's one."""

    buffers: float
    """Gradients in communication, and gathered weights."""

    activations: float
    """Saved for the backward pass."""

    loss: float
    """Candidate rows, outputs, their gradients, and a chunk of scores."""

    table: float = 0.0
    """A sharded embedding: the rank's rows and their moments, and the rows that a step fetches."""

    graphs: float = 0.0
    """The memory pool of CUDA graphs: activations and the loss a second time, since evaluations and micro-batches of
    other shapes run outside of the graphs, and weights or gradients in half precision."""

    host: float = 0.0
    """Bytes offloaded to the host's memory; not in the total."""

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer + self.buffers
        return states + self.activations + self.loss + self.table + self.graphs


def rank_memory(plan: RunPlan, stage: int | None = None) -> RankMemory:
    """The memory of a rank in the phase that needs most, at the config's ZeRO stage or at `stage`."""
    plan = plan if stage is None else plan.at_stage(stage)
    phases = [replace(plan, config=phase.config) for phase in phases_of(plan.config)]
    return max(map(_phase_memory, phases), key=lambda memory: memory.total)


def _phase_memory(plan: RunPlan) -> RankMemory:
    config, zero = plan.config, plan.zero
    precision = "fp32" if config.engine.precision == "auto" else config.engine.precision
    weights, gradients, optimizer, buffers = _zero_bytes(plan, precision)
    muon_parameters = _muon_parameters(config)
    optimizer -= 4 * muon_parameters / (plan.data_ranks if plan.zero_stage else 1)  # Muon has one moment
    buffers += 6 * muon_parameters  # gathered in bf16, and fp32 updates
    host = optimizer if "offload_optimizer" in zero else 0
    if "offload_param" in zero:
        host, weights = host + weights, 0
    optimizer = 0 if "offload_optimizer" in zero else optimizer
    element_size = 4 if precision == "fp32" else 2
    embedding = sharded_embedding_bytes(config, plan.ranks, _ids_of_step(plan))
    activations, loss = activation_bytes(config, element_size), _loss_bytes(plan, precision)
    pool = activations + loss + (0 if precision == "fp32" else 2 * rank_parameters(config))
    graphs = pool if plan.device == "cuda" and plan.uses_cuda_graphs() else 0
    return RankMemory(weights, gradients, optimizer, buffers, activations, loss, embedding, graphs, host)


def _ids_of_step(plan: RunPlan) -> int:
    """Distinct ids that a rank looks up in a step: of its inputs, and of all groups that it has a part of."""
    config, batch = plan.config, plan.config.batch
    rows, rows_per_micro_step = batch.global_size // plan.data_ranks, batch.micro_size * plan.data_ranks
    rows_in_groups = rows * min(max(plan.group_samples(), batch.micro_size), rows_per_micro_step) // batch.micro_size
    tokens = max(rows * config.data.sequence_length, rows_in_groups * config.targets_per_row())
    return expected_candidates(tokens, config.model.vocab_size)


def _muon_parameters(config: RunConfig) -> float:
    """Parameters of one tensor rank that Muon updates: matrices of trained blocks."""
    if config.optimizer.name != "muon":
        return 0
    own = config.objective.auxiliary_or_empty().head_blocks(config.model)
    trained = _model_configs(config)[config.freezes_body() :]
    split_layers = sum(model.num_layers for model in trained) / config.parallel.tensor
    layers = split_layers + (0 if own is None else own.num_layers)
    return layers * (attention_matrices(config.model) + mlp_matrices(config.model))


def _zero_bytes(plan: RunPlan, precision: str) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, optimizer and buffers at the peak.

    Where two buffers never exist at the same time, the larger one is counted. Buckets are counted in full.
    """
    parameters, trained = rank_parameters(plan.config), rank_parameters(plan.config, trained=True)
    zero, stage, element_size = plan.zero, plan.zero_stage, 4 if precision == "fp32" else 2
    share = trained / plan.data_ranks
    bucket, buckets = _zero_setting(zero, "reduce_bucket_size"), 2 if stage < 3 and zero.get("overlap_comm") else 1
    bucket_bytes = (
        (4 if stage == 1 else element_size) * bucket * buckets if zero.get("contiguous_gradients", True) else 0
    )
    send_copy = 4 * min(trained, bucket)  # of the gradients in one all-reduce
    if stage == 0:  # autocast keeps weights in bf16 from the forward to the backward pass
        kept = trained if plan.config.freezes_embedding() else parameters
        return 4 * parameters, 4 * trained, 8 * trained, send_copy + (2 * kept if element_size == 2 else 0)
    separate_fp32_sum = precision == "bf16" and "offload_optimizer" not in zero
    if stage == 1 and separate_fp32_sum:  # gradients: fp32 sum; buffers: bf16 gradients, or later the sum in bf16
        return 2 * parameters, 4 * trained, 12 * share, 2 * trained + send_copy
    if stage == 1:  # the optimizer copies the rank's gradients; under fp32 after freeing the others
        copy = 4 * share if element_size == 2 else max(0, 8 * share - 4 * trained)
        return element_size * parameters, 4 * trained, 12 * share, copy + bucket_bytes
    if stage == 2:  # a micro-batch's gradients and their sum; later the gathered weights
        largest = max(element_size * share, element_size * trained - 4 * share)
        return element_size * parameters, 4 * share, 12 * share, largest + bucket_bytes
    live = min(parameters, _zero_setting(zero, "stage3_max_live_parameters"))
    prefetched = min(parameters, _zero_setting(zero, "stage3_prefetch_bucket_size"))  # twice during the all-gather
    gathered = max(element_size * (live + prefetched), 4 * share)
    return element_size * parameters / plan.data_ranks, 4 * share, 12 * share, gathered + bucket_bytes


def _zero_setting(zero: Mapping[str, Any], name: str) -> float:
    """A size in elements; the default if it is not a number (DeepSpeed rejects the run then)."""
    value = zero.get(name)
    return value if isinstance(value, int | float) else _DEFAULTS[name]


def memory_reductions(plan: RunPlan, stage: int | None = None) -> list[str]:
    """Hints that reduce the memory of a rank, the cheapest first, at the config's ZeRO stage or at `stage`."""
    engine, batch, mesh = plan.config.engine, plan.config.batch, plan.config.parallel
    stage = plan.zero_stage if stage is None else stage
    hints = [f"take a higher ZeRO stage in engine.deepspeed (now {stage})"] if stage < 3 else ["take more ranks"]
    if batch.micro_size > 1:
        hints.append(f"lower batch.micro_size (now {batch.micro_size})")
    if not engine.activation_checkpointing:
        hints.append("set engine.activation_checkpointing")
    if mesh.tensor > 1 and not mesh.sequence:
        hints.append("set parallel.sequence")
    hints.append(f"raise parallel.tensor (now {mesh.tensor})")
    if not plan.zero.get("offload_optimizer"):
        hints.append("offload to the host with an *_offload.json")
    return hints


def rank_parameters(config: RunConfig, *, trained: bool = False) -> int:
    """Parameters of one tensor rank, without a sharded embedding; `trained`: only those that are not frozen. Norms,
    positions, biases of row-parallel layers, all of a head but its matrix, and key and value projections with fewer
    heads than ranks are replicated."""
    model, tensor = config.model_with_mask_decoder(), config.parallel.tensor
    norm, keys = norm_parameters(model), 2 * model.key_heads() * model.head_size()
    per_block = model.norms_per_block() * norm + model.hidden_size * ((model.attention_bias == "all") + model.mlp_bias)
    per_block += 2 * model.head_size() if model.qk_norm else 0
    per_block += keys * (model.hidden_size + (model.attention_bias != "none")) if model.key_heads() < tensor else 0
    is_frozen, counts = trained and config.freezes_body(), run_parameters(config)
    models = _model_configs(config)[is_frozen:]
    replicated = sum(each.num_layers * per_block + norm + position_parameters(each) for each in models)
    replicated += _replicated_head(config)
    excluded = counts.body if is_frozen else 0
    excluded += counts.embedding if shards_embedding(config) or (trained and config.freezes_embedding()) else 0
    return replicated + (counts.total - excluded - replicated) // tensor


def _loss_bytes(plan: RunPlan, precision: str) -> float:
    """Bytes of outputs, candidate rows and their gradients, and of a chunk of scores (`losses.fused_softmax`).

    In half precision the rows' gradient is fp32. On GPUs a kernel computes the scores, except harmonic ones (minus the
    logarithm of a distance), which are not linear in the products. On CPUs both gradients are fp32, and once the scores
    are freed, copied in the dtype of the matrices.
    """
    config, micro_size, tensor = plan.config, plan.config.batch.micro_size, plan.config.parallel.tensor
    is_half, is_linear, total = precision != "fp32", config.objective.score != "harmonic", 0.0
    is_kernel = is_linear and plan.device == "cuda"
    sizes, score_size = (GPU_CHUNKS, gpu_score_bytes(precision)) if is_kernel else (CPU_CHUNKS, 4)
    copy_size = 4 if not is_linear else 2 if precision == "bf16" and not is_kernel else 0  # derivatives, or bf16 scores
    groups = micro_size // min(plan.group_samples(), micro_size)
    shared = config.targets_per_row(), candidate_rows(config, plan.data_ranks)
    own = _auxiliary_targets(config, shared[1], plan.data_ranks)
    parts = [(*shared, groups), (*own, groups)]
    if config.objective.vanilla_weight:
        parts += [(targets_per_row, config.model.padded_vocab_size(), 1) for targets_per_row, _ in (shared, own)]
    for targets_per_row, candidates, groups in parts:
        targets, rows = micro_size * targets_per_row, candidates / tensor  # rows of each group
        if not targets:
            continue
        chunk = sizes.outputs_per_chunk(targets // groups, math.ceil(rows), score_size)
        size, scores = 2 if is_half else 4, (score_size + copy_size) * chunk * rows
        numbers, row_numbers = (config.model.hidden_size * count for count in (targets + groups * rows, groups * rows))
        if plan.device == "cpu":
            total += (size + 4) * numbers + max(size * numbers, scores)
        else:
            total += 2 * size * numbers + (4 * row_numbers if is_half else 0) + scores
    if config.objective.auxiliary_or_empty().has_bag_of_words():
        # nine fp32 matrices [texts, ids] (measured: 64 texts, 30,522 ids)
        total += 9 * 4 * micro_size * own[1] / tensor
    return total
