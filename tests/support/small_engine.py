"""A small model, its batches and its engine, shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from megahead.models.parallel import shard_dims
from support.small_run import shipped

CPU = torch.device("cpu")
VOCAB, WIDTH = 37, 12


class SmallBatch(NamedTuple):
    ids_N: Tensor
    targets_N: Tensor
    scale: float
    """Factor that makes the sum over targets what DeepSpeed averages into the mean of the global batch."""


class Head(nn.Module):
    """Only a weight: its owner multiplies by it, and it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) / 4)


class SmallModel(nn.Module):
    """Embedding, normed MLP, and scores against the embedding's own weight or an untied head's."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.dropout = nn.Dropout(0.0)
        if not tied:
            self.head = Head()

    def scores(self, ids_N: Tensor) -> Tensor:
        hidden_ND = self.embedding(ids_N)
        hidden_ND = hidden_ND + self.dropout(self.down(torch.relu(self.up(self.norm(hidden_ND)))))
        owner = self.head if hasattr(self, "head") else self.embedding
        return hidden_ND @ owner.weight.T

    def forward(self, batch: SmallBatch, reduction: str = "sum") -> Tensor:
        scores_NV = self.scores(batch.ids_N).float()
        return nn.functional.cross_entropy(scores_NV, batch.targets_N, reduction=reduction) * batch.scale


def small_batches(counts: list[int], scale: float, seed: int) -> list[SmallBatch]:
    """A batch of random ids and targets for each count."""
    g = torch.Generator().manual_seed(seed)
    pairs = [torch.randint(0, VOCAB, (2, count), generator=g) for count in counts]
    return [SmallBatch(ids, targets, scale) for ids, targets in pairs]


def small_optimizer(module: nn.Module) -> torch.optim.AdamW:
    """AdamW with two parameter groups: matrices decay, the rest does not."""
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in trainable if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1.0, betas=(0.9, 0.95))


def small_engine(
    group: Group,
    stage: int,
    precision: str = "fp32",
    *,
    accumulation: int = 1,
    clipping: float = 0.5,
    module: nn.Module | None = None,
    tensor_size: int = 1,
    persistence_threshold: int = 0,
    offload: bool = False,
    zero: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = small_optimizer,
) -> Engine:
    """An engine as a run would get it with the settings we ship, those of `zero` and of `deepspeed` changed.

    At stage 3 even the smallest parameter is cut up unless told otherwise.
    """
    module = SmallModel() if module is None else module
    mesh = Mesh.build(group, tensor_size)
    content = shipped(f"zero{stage}_offload" if offload else f"zero{stage}") | (deepspeed or {})
    content["zero_optimization"] |= {"stage3_param_persistence_threshold": persistence_threshold} | (zero or {})
    run = RunConfig.model_validate(
        {
            "name": "small",
            "model": {"num_layers": 1, "hidden_size": WIDTH, "num_heads": 1, "rotary_pct": 1.0, "vocab_size": VOCAB},
            "data": {"train": "nowhere", "sequence_length": 8},
            "batch": {"global_size": accumulation * mesh.data_group.size, "micro_size": 1},
            "optimizer": {"learning_rate": 1.0, "gradient_clipping": clipping},
            "training": {"steps": 1},
            "engine": {"deepspeed": content, "precision": precision},
        }
    )
    config = deepspeed_config(run, mesh.data_group.size)
    weights = own_weights(module, mesh.tensor_group)
    return Engine(
        module,
        optimizer=optimizer(module),
        config=config,
        mesh=mesh,
        device=CPU,
        weights=FullTensors(weights.__getitem__),
    )


def own_weights(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """The whole of each of the module's parameters, copied. Collective where they are split over `group`."""
    dims, own = shard_dims(module), {}
    for name, parameter in module.named_parameters():
        part = parameter.detach().clone()
        own[name] = group.unshard(part, dims[name]) if name in dims else part
    return own


def whole(engine: Engine) -> dict[str, Tensor]:
    """The engine's tensors, copied."""
    return {name: tensor.clone() for name, tensor in engine.tensors()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names that are not bitwise equal, or only on one side."""
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])]
