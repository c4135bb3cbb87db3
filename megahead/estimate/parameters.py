"""Exact parameter counts of a model, from its config.

D hidden size, F width of the MLP, L blocks, V rows of the embedding table (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

from megahead.config import ModelConfig, RunConfig


@dataclass(frozen=True)
class ParameterCounts:
    """How many numbers a model learns, by part."""

    embedding: int
    """V D."""

    body: int
    """Blocks and final norm: L (4 D^2 + 2 D F + F + 9 D) + 2 D. Pythia's "non-embedding parameters". In an encoder the
    embedding's norm, positions and types instead of the final norm."""

    head: int
    """V D for an untied vanilla head; D^2 + 3 D + V for an encoder's transform and bias; else 0."""

    @property
    def total(self) -> int:
        return self.embedding + self.body + self.head


def count_parameters(config: ModelConfig, *, untied_head: bool = False, mask_head: bool = False) -> ParameterCounts:
    """Parameters of `config`'s backbone, and of an output matrix (`untied_head`) and BERT's transform (`mask_head`)."""
    hidden, mlp = config.hidden_size, config.mlp_size()
    attention = (hidden + 1) * 3 * hidden + (hidden + 1) * hidden
    feed_forward = (hidden + 1) * mlp + (mlp + 1) * hidden
    norm = 2 * hidden
    table = config.padded_vocab_size() * hidden
    body = config.num_layers * (attention + feed_forward + 2 * norm) + norm
    if config.is_encoder():
        body += (config.max_positions + config.token_types) * hidden
    transform = hidden**2 + hidden + norm + config.padded_vocab_size()
    head = (table if untied_head else 0) + (transform if mask_head else 0)
    return ParameterCounts(embedding=table, body=body, head=head)


def run_parameters(config: RunConfig) -> ParameterCounts:
    """Parameters of what a run trains."""
    objective, encoder = config.objective, config.model.is_encoder()
    return count_parameters(
        config.model,
        untied_head=objective.trains_head(),
        mask_head=encoder and objective.has_vocabulary_softmax(),
    )
