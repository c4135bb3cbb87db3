"""Faults that no loss shows: a rank that is slow, weights that are not the same on all ranks that hold them."""

from __future__ import annotations

import socket

from megahead.config import FaultsConfig
from megahead.distributed import Group
from megahead.engine import Engine, weight_sums
from megahead.train.pace import Pace
from megahead.train.replicas import OddReplica, odd_replica


class Health:
    """Watches the ranks of `world_group` (CPU tensors), of which `data_ranks` hold the same. Made on all of them."""

    def __init__(self, rules: FaultsConfig, engine: Engine, world_group: Group, data_ranks: int) -> None:
        self._rules, self._engine, self._world_group, self._data_ranks = rules, engine, world_group, data_ranks
        self.hosts = world_group.all_gather_objects(socket.gethostname())
        """Each rank's."""
        self.pace = Pace(self.hosts, rules.slow_rank)

    def due(self, step: int, keeps: bool) -> bool:
        """Whether to compare replicas behind that step: from time to time, and before a checkpoint or a copy."""
        return self._rules.replicas != "off" and (keeps or step % self._rules.replicas_every == 0)

    def odd_replica(self) -> OddReplica | None:
        """Ranks whose weights differ from others'. Reads the weights once, sends 8 bytes for each. Collective."""
        weights = self._engine.replicated()
        if not weights or self._data_ranks == 1:
            return None
        sums_WP = self._world_group.all_gather(weight_sums(weights.values()))
        return odd_replica(sums_WP.unflatten(0, (self._data_ranks, -1)), list(weights))
