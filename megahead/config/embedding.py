"""Where a run's embedding lies: a weight like all others, or sharded: its rows lie round-robin on all ranks.

Rows that get no gradient at a step are what a sharded embedding saves; where all get one it only costs.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from megahead.errors import ConfigError

if TYPE_CHECKING:
    from megahead.config.run import RunConfig
    from megahead.config.training import OptimizerConfig

_SHARDED_FROM = 1 << 16
"""Ids from which `auto` shards: on one CPU, where nothing is sent, both ways take the same time there."""


class ShardingConflict(NamedTuple):
    """What keeps an embedding from being sharded."""

    reason: str
    """In the banner."""

    error: ConfigError
    """Where `engine.embedding: rows` was set."""


def shards_embedding(config: RunConfig) -> bool:
    """Whether a run's embedding is sharded: as `engine.embedding` says, or by `auto` where it has many rows or an
    update rule of its own, and nothing keeps it from that."""
    if config.engine.embedding != "auto":
        return config.engine.embedding == "rows"
    wanted = config.model.vocab_size >= _SHARDED_FROM or config.optimizer.table.rule != "adamw"
    return wanted and sharding_conflict(config) is None


def sharding_conflict(config: RunConfig) -> ShardingConflict | None:
    """What keeps a run's embedding from being sharded; None where it may be."""
    (b1, b2), table = config.optimizer.betas, config.optimizer.table
    if config.objective.has_vocabulary_softmax():
        rule = "be `dense` where all ids compete, and each row is updated at each step"
        return ShardingConflict("all ids compete", ConfigError("engine.embedding", rule, got="`rows`"))
    auxiliary = config.objective.auxiliary()
    if auxiliary is not None and auxiliary.dense_embedding_reason is not None:
        reason, rule = auxiliary.dense_embedding_reason
        return ShardingConflict(reason, ConfigError("engine.embedding", rule, got="`rows`"))
    if (decay := _decay_error(config.optimizer)) is not None:
        return ShardingConflict("weight decay leaves nothing", decay)
    if table.rule != "adagrad" and b1 > 0.98 * sqrt(b2):
        rule = "have a first of at most 0.98 times the root of the second with engine.embedding: rows"
        hint = "or set optimizer.table.rule=adagrad"
        return ShardingConflict(
            "optimizer.betas are too near", ConfigError("optimizer.betas", rule, got=[b1, b2], hint=hint)
        )
    return None


def _decay_error(optimizer: OptimizerConfig) -> ConfigError | None:
    ratio = optimizer.table.learning_rate_ratio
    if optimizer.learning_rate * optimizer.weight_decay * ratio < 1:
        return None
    rule = "leave a part of a weight at each step (learning_rate * weight_decay * ratio below 1)"
    return ConfigError("optimizer.table.learning_rate_ratio", rule, got=ratio)


def check_embedding(config: RunConfig) -> None:
    """ConfigError unless `engine.embedding` and `optimizer.table` fit the run."""
    table, decay, refused = config.optimizer.table, _decay_error(config.optimizer), sharding_conflict(config)
    if decay is not None and table.learning_rate_ratio != 1:
        raise decay
    if config.engine.embedding == "rows" and refused is not None:
        raise refused.error
    if table.rule != "adamw" and not shards_embedding(config):
        raise ConfigError("optimizer.table.rule", "be adamw where the embedding is dense", got=table.rule)
    if table.rule != "adamw" and config.objective.ends_with_vanilla():
        rule = "be adamw with objective.schedule.vanilla_share, by which all rows end"
        raise ConfigError("optimizer.table.rule", rule, got=table.rule)


def describe_embedding(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    """The banner's lines: how the embedding is sharded, or why a large one is not, and at which rate it learns."""
    table, refused = config.optimizer.table, sharding_conflict(config)
    if not shards_embedding(config):
        many = config.engine.embedding == "auto" and config.model.vocab_size >= _SHARDED_FROM
        return [("embedding", f"dense, because {refused.reason}")] if many and refused else []
    rows = config.model.padded_vocab_size()
    share = f"{rows:,} rows, {-(-rows // ranks):,} a rank"
    return [("embedding", f"{share}, updated by {table.rule} at {table.learning_rate_ratio:g} times the learning rate")]


def dense_embedding_lr_ratio(config: RunConfig) -> float:
    """Learning rate of a dense embedding over that of other weights; 1 for a sharded one, whose own line has it."""
    return 1.0 if shards_embedding(config) else config.optimizer.table.learning_rate_ratio


def sharded_embedding_bytes(config: RunConfig, ranks: int, used_ids: int) -> float:
    """Bytes of a sharded embedding on one of `ranks` whose steps use so many ids; 0 for a dense one, which is a weight.

    Weight and moments of the rank's rows, and the step they were last updated at; of a step's rows the copies with
    moments that are brought up to date, and as many rows fetched, with their gradients, sent and summed.
    """
    if not shards_embedding(config):
        return 0.0
    rows, hidden = config.model.padded_vocab_size(), config.model.hidden_size
    a_row = 4 * {"adamw": 3 * hidden, "adamw_row": 2 * hidden + 1, "adagrad": hidden + 1}[config.optimizer.table.rule]
    return (a_row + 4) * rows / ranks + (a_row + 4 * 5 * hidden) * used_ids
