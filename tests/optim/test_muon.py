"""Muon's update is that of torch's own Muon; all other weights move by AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megahead import optim as muon
from megahead.config.model import ModelConfig
from megahead.config.training import MuonConfig, OptimizerConfig
from megahead.models.families import build_backbone
from megahead.optim import Muon, build_optimizer, orthogonalize, set_learning_rate

CONFIG = OptimizerConfig(
    name="muon", learning_rate=0.02, weight_decay=0.3, muon=MuonConfig(momentum=0.9, learning_rate_ratio=0.5)
)
ONE_RATE = {"muon": MuonConfig(momentum=0.9)}
RATES = [0.001, 0.02, 0.01, 0.0]


class Small(nn.Module):
    """A tall, a wide and a square matrix in blocks, and a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 20), nn.Linear(20, 6), nn.Linear(6, 6)])


def train(module: nn.Module, optimizers: list[torch.optim.Optimizer], ratios: list[float]) -> dict[str, Tensor]:
    """The weights after a step at each rate, on gradients that are always the same."""
    chance = torch.Generator().manual_seed(1)
    for rate in RATES:
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=chance)
        for optimizer, ratio in zip(optimizers, ratios, strict=True):
            set_learning_rate(optimizer.param_groups, rate * ratio)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def torchs_own() -> dict[str, Tensor]:
    module = Small()
    matrices = [layer.weight for layer in module.blocks]
    vectors = [layer.bias for layer in module.blocks]
    muon = torch.optim.Muon(matrices, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    settings = {"betas": CONFIG.betas, "eps": CONFIG.eps}
    table = torch.optim.AdamW([module.embedding.weight], weight_decay=0.3, **settings)
    rest = torch.optim.AdamW(vectors, weight_decay=0.0, **settings)
    return train(module, [muon, table, rest], [0.5, 1.0, 1.0])


def test_the_update_is_that_of_torch() -> None:
    module, expected = Small(), torchs_own()
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = build_optimizer(module, CONFIG)
    assert isinstance(optimizer, Muon)
    ours = train(module, [optimizer], [1.0])
    for name, weight in expected.items():
        assert (weight - start[name]).abs().max() > 4e-3
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-7)


def test_it_keeps_one_moment_of_a_matrix_and_counts_its_steps() -> None:
    module = Small()
    optimizer = build_optimizer(module, CONFIG)
    train(module, [optimizer], [1.0])
    state = optimizer.state[module.blocks[0].weight]
    assert state.keys() == {"step", "exp_avg"}
    assert int(state["step"]) == len(RATES)


def test_queries_keys_and_values_of_one_projection_move_as_three_matrices() -> None:
    config = ModelConfig(num_layers=1, hidden_size=12, num_heads=3, rotary_pct=1.0, vocab_size=8, vocab_multiple=8)
    torch.manual_seed(0)
    attention = build_backbone(config).blocks[0].attention
    joint, gradient = attention.qkv.weight, torch.randn(36, 12)
    apart = [nn.Parameter(torch.empty(12, 12)) for _ in range(3)]
    for number, matrix in enumerate(apart):
        rows = [12 * head + 4 * number + row for head in range(3) for row in range(4)]  # head by head q, k, v
        matrix.data, matrix.grad = joint.detach()[rows], gradient[rows]
    torch.optim.Muon(apart, lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
    joint.grad = gradient
    build_optimizer(
        nn.ModuleDict({"blocks": nn.ModuleDict({"0": attention})}), CONFIG.model_copy(update=ONE_RATE)
    ).step()
    for number, matrix in enumerate(apart):
        moved = joint.detach().unflatten(0, (3, 3, 4))[:, number].flatten(0, 1)
        torch.testing.assert_close(moved, matrix.detach(), rtol=0, atol=1e-7)


class Formats(TorchDispatchMode):
    """Notes of which numbers the products were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            self.seen.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(48, 48), (48, 200), (200, 48), (3, 48, 48)])
def test_products_are_of_the_numbers_that_are_fast_and_come_out_alike(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = {}
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(muon, "has_fast_bf16", lambda _, fast=fast: fast)
        with Formats() as formats:
            made[fast] = orthogonalize(matrix)
        assert formats.seen == {expected}
    assert (made[True] - made[False]).norm() < 0.01 * made[True].norm()
