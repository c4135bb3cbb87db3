"""Where the embedding lies: a weight like all others, or a table whose rows are sharded round-robin over all ranks.

Rows that get no gradient at a step are what a table of rows saves; where all get one it only costs.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from megahead.config.objective import ObjectiveConfig
from megahead.config.training import OptimizerConfig, TableConfig
from megahead.errors import ConfigError

ROWS_FROM = 1 << 16
"""Ids from which `auto` takes rows: on one CPU, where nothing is sent, both ways take the same time there."""


class Refusal(NamedTuple):
    """What keeps an embedding from lying in rows."""

    reason: str
    """In the banner."""

    error: ConfigError
    """Where rows were asked for."""


def refusal_of_rows(objective: ObjectiveConfig, optimizer: OptimizerConfig) -> Refusal | None:
    """What keeps the embedding of such a run from lying in rows; None where it may."""
    (b1, b2), table = optimizer.betas, optimizer.table
    if objective.has_vocabulary_softmax():
        rule = "be `dense` where all ids compete, and each row is updated at each step"
        return Refusal("all ids compete", ConfigError("engine.embedding", rule, got="`rows`"))
    if objective.replaced_tokens is not None:
        rule = "be `dense` with objective.replaced_tokens, whose held-out tokens are drawn from all ids at once"
        return Refusal("replaced tokens are drawn", ConfigError("engine.embedding", rule, got="`rows`"))
    if (decay := refusal_of_decay(optimizer)) is not None:
        return Refusal("weight decay leaves nothing", decay)
    if table.rule != "adagrad" and b1 > 0.98 * sqrt(b2):
        rule = "have a first of at most 0.98 times the root of the second with engine.embedding: rows"
        hint = "or set optimizer.table.rule=adagrad"
        return Refusal("optimizer.betas are too near", ConfigError("optimizer.betas", rule, got=[b1, b2], hint=hint))
    return None


def refusal_of_decay(optimizer: OptimizerConfig) -> ConfigError | None:
    """What keeps the embedding from having such a learning rate of its own."""
    ratio = optimizer.table.learning_rate_ratio
    if optimizer.learning_rate * optimizer.weight_decay * ratio < 1:
        return None
    rule = "leave a part of a weight at each step (learning_rate * weight_decay * ratio below 1)"
    return ConfigError("optimizer.table.learning_rate_ratio", rule, got=ratio)


def wants_rows(vocab_size: int, table: TableConfig) -> bool:
    """Whether `auto` takes rows where nothing keeps it from that: they have a rule of their own, or they are many."""
    return vocab_size >= ROWS_FROM or table.rule != "adamw"
