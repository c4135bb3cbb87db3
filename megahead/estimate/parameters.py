"""Exact parameter counts of a model, from its config.

D hidden size, F width of the MLP, L blocks, V rows of the embedding table (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

from megahead.config import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """How many numbers a model learns, by part."""

    embedding: int
    """V D."""

    body: int
    """Blocks and final norm: L (4 D^2 + 2 D F + F + 9 D) + 2 D. Pythia's "non-embedding parameters"."""

    head: int
    """V D for an untied vanilla head, else 0."""

    @property
    def total(self) -> int:
        return self.embedding + self.body + self.head


def count_parameters(config: ModelConfig, *, untied_head: bool = False) -> ParameterCounts:
    """Parameters of `config`'s backbone, and of a head of its own where `untied_head`."""
    hidden, mlp = config.hidden_size, config.mlp_size()
    attention = (hidden + 1) * 3 * hidden + (hidden + 1) * hidden
    feed_forward = (hidden + 1) * mlp + (mlp + 1) * hidden
    norm = 2 * hidden
    table = config.padded_vocab_size() * hidden
    body = config.num_layers * (attention + feed_forward + 2 * norm) + norm
    return ParameterCounts(embedding=table, body=body, head=table if untied_head else 0)
