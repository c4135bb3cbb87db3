"""Whether a run's embedding is dense (a weight like all others) or sharded (rows distributed round-robin over ranks).

A sharded embedding saves the work on rows without a gradient; if every row gets one at each step, it only costs.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from megahead.errors import ConfigError

if TYPE_CHECKING:
    from megahead.config.run import RunConfig
    from megahead.config.training import OptimizerConfig

_MIN_SHARDED_IDS = 1 << 16
"""Vocabulary size from which `auto` shards. At this size a dense and a sharded one take the same time on one CPU,
without communication."""


class ShardingConflict(NamedTuple):
    """Why an embedding cannot be sharded."""

    reason: str
    """For the banner."""

    error: ConfigError
    """Raised with `engine.embedding: rows`."""


def shards_embedding(config: RunConfig) -> bool:
    """Whether a run's embedding is sharded, as `engine.embedding` says. `auto` shards one that can be sharded and has
    many rows or another update rule than adamw."""
    if config.engine.embedding != "auto":
        return config.engine.embedding == "rows"
    wanted = config.model.vocab_size >= _MIN_SHARDED_IDS or config.optimizer.table.rule != "adamw"
    return wanted and sharding_conflict(config) is None


def sharding_conflict(config: RunConfig) -> ShardingConflict | None:
    """Why a run's embedding cannot be sharded; None if it can."""
    (b1, b2), table = config.optimizer.betas, config.optimizer.table
    why_dense = config.objective.auxiliary_or_empty().dense_embedding_reason
    if config.objective.has_vocabulary_softmax():
        rule = "be `dense` with a softmax over the vocabulary, which updates each row at each step"
        why_dense = "the softmax covers all ids", rule
    elif config.objective.candidates == "own":
        rule = "be `dense` with objective.candidates: own, whose table is dense"
        why_dense = "candidates have their own table", rule
    if why_dense is not None:
        reason, rule = why_dense
        return ShardingConflict(reason, ConfigError("engine.embedding", rule, got="`rows`"))
    if (decay := _decay_error(config.optimizer)) is not None:
        return ShardingConflict("weight decay exceeds the weights", decay)
    if table.rule != "adagrad" and b1 > min(b2, 0.98 * sqrt(b2)):
        rule = "have a first of at most the second, and 0.98 times its root, with engine.embedding: rows"
        error = ConfigError("optimizer.betas", rule, got=[b1, b2], hint="or set optimizer.table.rule=adagrad")
        return ShardingConflict("the first of optimizer.betas is too large", error)
    return None


def _decay_error(optimizer: OptimizerConfig) -> ConfigError | None:
    ratio = optimizer.table.learning_rate_ratio
    if optimizer.learning_rate * optimizer.weight_decay * ratio < 1:
        return None
    rule = "leave a part of a weight at each step (learning_rate * weight_decay * ratio below 1)"
    return ConfigError("optimizer.table.learning_rate_ratio", rule, got=ratio)


def check_embedding(config: RunConfig) -> None:
    """Raises ConfigError if the run cannot use its `engine.embedding` or `optimizer.table`."""
    table, decay, conflict = config.optimizer.table, _decay_error(config.optimizer), sharding_conflict(config)
    if decay is not None and table.learning_rate_ratio != 1:
        raise decay
    if config.engine.embedding == "rows" and conflict is not None:
        raise conflict.error
    if table.rule != "adamw" and not shards_embedding(config):
        raise ConfigError("optimizer.table.rule", "be adamw where the embedding is dense", got=table.rule)
    if table.rule != "adamw" and config.objective.ends_with_vanilla():
        rule = "be adamw with objective.schedule.vanilla_share, whose last phase updates all rows"
        raise ConfigError("optimizer.table.rule", rule, got=table.rule)


def describe_embedding(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    """The banner's lines: how the embedding is sharded and its learning rate, or why a large one is dense."""
    table, conflict = config.optimizer.table, sharding_conflict(config)
    if not shards_embedding(config):
        is_large = config.engine.embedding == "auto" and config.model.vocab_size >= _MIN_SHARDED_IDS
        return [("embedding", f"dense, because {conflict.reason}")] if is_large and conflict else []
    rows = config.model.padded_vocab_size()
    share = f"{rows:,} rows, {-(-rows // ranks):,} a rank"
    return [("embedding", f"{share}, updated by {table.rule} at {table.learning_rate_ratio:g} times the learning rate")]


def dense_embedding_lr_ratio(config: RunConfig) -> float:
    """Learning rate of a dense embedding over that of other weights; 1 for a sharded one, whose ratio
    `describe_embedding` prints."""
    return 1.0 if shards_embedding(config) else config.optimizer.table.learning_rate_ratio


def sharded_embedding_bytes(config: RunConfig, ranks: int, used_ids: int) -> float:
    """Bytes of a sharded embedding on one of `ranks` ranks, with `used_ids` distinct ids per step; 0 if dense.

    Counts the rank's rows with their moments and last-update steps, and for the rows of a step: copies with moments,
    rows gathered from other ranks, and their gradients, sent and summed.
    """
    if not shards_embedding(config):
        return 0.0
    rows, hidden = config.model.padded_vocab_size(), config.model.hidden_size
    numbers = {"adamw": 3 * hidden, "adamw_row": 2 * hidden + 1, "adagrad": hidden + 1}[config.optimizer.table.rule]
    row_bytes = 4 * numbers
    return (row_bytes + 4) * rows / ranks + (row_bytes + 4 * 5 * hidden) * used_ids
