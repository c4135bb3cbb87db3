"""Exact parameter counts of a model, from its config.

D hidden size, A total width of the query heads (mostly D), K total width of the key heads, F width of the MLP, L
blocks, V rows of the embedding table (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megahead.config import ModelConfig, RunConfig, phases_of


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
    V for a bias alone; D^2 + 2 D + 1 for what judges tokens; 1 for a learned temperature; else 0."""

    generator: int = 0
    """Of replaced-token detection: blocks, norms and positions of its own; it has no table."""

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
        config.trained_model(),
        untied_head=objective.trains_head(),
        mask_head=encoder and objective.has_mask_head(),
        output_bias=objective.output_bias,
    )
    counts = replace(counts, head=counts.head + objective.learned_temperature)
    generator = config.generator()
    if generator is None:
        return counts
    return replace(counts, generator=count_parameters(generator).body, head=counts.head + detection_head(config.model))


def detection_head(config: ModelConfig) -> int:
    """Of what judges whether a token was replaced: D^2 + 2 D + 1."""
    return (config.hidden_size + 2) * config.hidden_size + 1
