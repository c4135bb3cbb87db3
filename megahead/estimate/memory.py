"""Memory of one rank while it trains, by part, from the config: does it fit, and which ZeRO stage does it need.

P parameters of one tensor rank, d data ranks, t tensor ranks, c bytes of a number in forward and backward;
B rows of a micro-batch, T tokens a row, D hidden size, F width of the MLP, L blocks, U candidates.
What DeepSpeed keeps at each stage was read off its optimizers; what the allocator and the collectives take comes on
top: measured peaks of 49 M parameters on a CPU (two ranks, fp32 and bf16) were 1.0 to 1.4 times what is told here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megahead.config import RunConfig, deepspeed_config
from megahead.config.deepspeed import zero_stage
from megahead.estimate.parameters import run_parameters

_BUCKET = 500_000_000  # DeepSpeed's default `reduce_bucket_size` and `allreduce_bucket_size`, in numbers
_LIVE = 1_000_000_000  # its default `stage3_max_live_parameters`
_CHUNK_BYTES = 32 * 2**20  # of scores that the loss holds at once


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank at the peak of a step."""

    weights: float
    """The model's own copy."""

    gradients: float

    optimizer: float
    """fp32 masters and Adam's two moments."""

    buffers: float
    """What is being sent, or gathered to compute with."""

    activations: float
    """Kept for the backward pass."""

    loss: float
    """Rows of the candidates, a chunk of scores, and both gradients."""

    host: float = 0.0
    """Bytes that offloading moved to the host's memory; not in the total."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations + self.loss


def rank_memory(config: RunConfig, world_size: int, stage: int | None = None) -> RankMemory:
    """The memory of each of `world_size` ranks; at another ZeRO `stage` than the config's where given."""
    data = config.parallel.data_ranks(world_size)
    content = deepspeed_config(config, data)
    zero = content.get("zero_optimization", {})
    stage = zero_stage(content) if stage is None else stage
    numbers, half = rank_parameters(config), config.engine.precision != "fp32" and stage > 0
    weights, gradients, optimizer, buffers = _states(numbers, data, stage, 2 if half else 4, zero)
    host = optimizer if "offload_optimizer" in zero else 0
    if "offload_param" in zero:
        host, weights = host + weights, 0
    optimizer = 0 if "offload_optimizer" in zero else optimizer
    compute = 4 if config.engine.precision == "fp32" else 2
    return RankMemory(weights, gradients, optimizer, buffers, _activations(config, compute), _loss(config), host)


def _states(numbers: int, data: int, stage: int, width: int, zero: dict[str, Any]) -> tuple[float, float, float, float]:
    """Weights, gradients, optimizer, buffers; buckets are never larger than the model."""
    bucket = width * min(numbers, _BUCKET)
    share = numbers / data
    if stage == 0:
        return 4 * numbers, 4 * numbers, 8 * numbers, bucket
    if stage == 1:
        whole = 6 if width == 2 else 4  # bf16 gradients are summed up in fp32
        return width * numbers, whole * numbers, 12 * share, 4 * share + bucket
    if stage == 2:
        return width * numbers, 4 * share, 12 * share, 2 * bucket
    live = width * min(numbers, zero.get("stage3_max_live_parameters", _LIVE))
    return width * share, 4 * share, 12 * share, live + 3 * bucket


def rank_parameters(config: RunConfig) -> int:
    """Numbers in the parameters of one tensor rank: norms and biases of what is summed are held by each."""
    counts = run_parameters(config)
    held_by_each = config.model.hidden_size * (6 * config.model.num_layers + 2)
    return held_by_each + (counts.total - held_by_each) // config.parallel.tensor


def expected_candidates(targets: int, vocab_size: int) -> int:
    """Unique ids among `targets` tokens of text: 4,300 x (targets / 16,384)^0.62, as English Wikipedia has under a
    vocabulary of 50,000 (measured 4.3k, 10.9k, 22k for 16k, 65k, 262k targets)."""
    of_text: float = 4300 * float(targets / 16384) ** 0.62
    return min(targets, vocab_size, round(of_text))


def candidate_rows(config: RunConfig) -> int:
    """Rows of the softmax of one micro-batch."""
    if config.objective.name == "vanilla":
        return config.model.padded_vocab_size()
    return expected_candidates(config.batch.micro_size * config.targets_per_row(), config.model.vocab_size)


def _activations(config: RunConfig, compute: int) -> float:
    """A block keeps its input, two normed inputs and (7 D + 2 F) / t; recomputed, all inputs and one block whole.

    Recomputed selectively, also 2 D + (4 D + F) / t of products and attention. Sequence parallelism divides the inputs
    by t too, and has one layer's gathered at a time.
    """
    model, tensor = config.model, config.parallel.tensor
    tokens = config.batch.micro_size * config.data.sequence_length
    held = model.hidden_size / (tensor if config.parallel.sequence else 1)
    block = 3 * held + (7 * model.hidden_size + 2 * model.mlp_size()) / tensor
    recompute = config.engine.activation_checkpointing
    dear = held + 2 * model.hidden_size + (4 * model.hidden_size + model.mlp_size()) / tensor
    kept = {False: block, True: held, "selective": dear}[recompute]
    working = (block if recompute else 0) + model.hidden_size - held
    return compute * tokens * (model.num_layers * kept + working)


def _loss(config: RunConfig) -> float:
    """Outputs and rows with their gradients in fp32, and a chunk of scores."""
    targets = config.batch.micro_size * config.targets_per_row()
    rows = candidate_rows(config) / config.parallel.tensor
    return 4 * 2 * (targets + rows) * config.model.hidden_size + min(_CHUNK_BYTES, 4 * targets * rows)
