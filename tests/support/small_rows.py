"""A small model with its embedding in rows, its engine and its steps, as a run puts them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import RoundRobinShard
from megahead.engine.engine import ShardedEmbeddingEngine, StepResult
from megahead.losses.candidates import unique_candidates
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import build_parallel_model, initial_weights
from megahead.optim import build_optimizer
from megahead.sharded_embedding.table import plan_rows, shard_embedding_
from support.causal_rows import causal_batch
from support.small_run import shipped, small_config

CPU = torch.device("cpu")
VOCABULARY, LENGTH, ACCUMULATION = 1000, 12, 2


class RowCourse:
    """An engine over rows that is given steps by their numbers: each has its own text, whatever the number of ranks."""

    def __init__(self, group: Group, stage: int = 0, changes: dict[str, Any] | None = None) -> None:
        self.mesh = Mesh.build(group)
        self.config = config_of(stage, changes or {}, group.size)
        self._asking = group.new_gloo_group()
        module = build_parallel_model(self.config, self.mesh.tensor_group, CPU)
        shard_embedding_(module.backbone, self.config, self.mesh, CPU)
        self.table = module.backbone.embedding
        self.engine = ShardedEmbeddingEngine(
            module,
            optimizer=build_optimizer(module, self.config.optimizer),
            config=deepspeed_config(self.config, group.size),
            mesh=self.mesh,
            device=CPU,
            weights=initial_weights(self.config),
        )

    def gather(self, number: int, factor: float = 1.0) -> list[float]:
        """Forward and backward passes of a step, its losses times `factor`."""
        micro_batches = [self._micro_batch(number, k, factor) for k in range(ACCUMULATION)]
        ids = torch.cat([micro.ids() for micro in micro_batches])
        self.engine.prepare_step(plan_rows(ids, self._asking, ACCUMULATION))
        return [float(self.engine.micro_step(micro)) for micro in micro_batches]

    def step(self, number: int, factor: float = 1.0) -> StepResult:
        self.gather(number, factor)
        return self.engine.step(3e-3 / (1 + number % 7))

    def state(self) -> dict[str, Tensor]:
        """Everything a restart needs, copied; of rows this rank's."""
        tensors = dict(self.engine.tensors())
        return {name: (t.part if isinstance(t, RoundRobinShard) else t).clone() for name, t in tensors.items()}

    def differs(self, other: RowCourse) -> list[str]:
        mine, theirs = self.state(), other.state()
        assert mine.keys() == theirs.keys()
        return [name for name in mine if not torch.equal(mine[name], theirs[name])]

    def _micro_batch(self, number: int, k: int, factor: float) -> MicroBatch:
        """Rows 8 / ranks / ACCUMULATION, of ids by Zipf's law."""
        ranks = self.mesh.world_group.size
        micro = 8 // ranks // ACCUMULATION
        share = 1 / np.arange(1, VOCABULARY + 1)
        rows = np.random.default_rng(number).choice(VOCABULARY, (8, LENGTH + 1), p=share / share.sum())
        first = (k * ranks + self.mesh.world_group.rank) * micro
        mine = rows[first : first + micro]
        batch = causal_batch(mine, end_token=0, isolate_documents=False, boundary_targets=True)
        candidates = tuple(unique_candidates(ids) for ids in batch.target_ids_N.split(LENGTH))
        return MicroBatch(batch, candidates, factor * ranks * ACCUMULATION / (8 * LENGTH))


def config_of(stage: int, changes: dict[str, Any], ranks: int) -> RunConfig:
    zero = shipped(f"zero{stage}")["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
    fixed = {
        "model.vocab_size": VOCABULARY,
        "engine.embedding": "rows",
        "engine.deepspeed": {"zero_optimization": zero, "fp16": {"initial_scale_power": 8}},
        "batch.micro_size": 8 // ranks // ACCUMULATION,
        "optimizer.eps": 1e-4,  # where a gradient is zero but for rounding, steps must not be its sign
        "optimizer.gradient_clipping": 0.5,
    }
    return small_config(Path("nowhere"), fixed | changes)
