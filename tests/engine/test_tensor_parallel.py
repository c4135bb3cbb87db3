"""Layers split over tensor ranks: the step equals plain torch, and state comes out whole and goes in on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from support.long import long
from support.on_ranks import on_ranks
from support.small_engine import SmallModel, differing, small_batches, small_engine, small_optimizer, whole

CLIPPING = 0.05


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce_(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce_(grad.clone()), None


def part(full: Tensor, group: Group, dim: int) -> nn.Parameter:
    parameter = nn.Parameter(group.shard(full.detach(), dim))
    parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


class Columns(nn.Module):
    """Output features split over the group."""

    shard_dims = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight, self.bias = part(full.weight, group, 0), part(full.bias, group, 0)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(SumBackward.apply(x, self.group), self.weight, self.bias)


class Rows(nn.Module):
    """Input features split over the group; the bias is every rank's own copy."""

    shard_dims = {"weight": 1}  # noqa: RUF012

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight, self.bias = part(full.weight, group, 1), nn.Parameter(full.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return SumForward.apply(nn.functional.linear(x, self.weight), self.group) + self.bias


def split_model(group: Group) -> SmallModel:
    model = SmallModel()
    model.up, model.down = Columns(model.up, group), Rows(model.down, group)  # type: ignore[assignment]
    return model


def plain(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    module = SmallModel()
    optimizer = small_optimizer(module)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in small_batches([7, 2], 1 / 9, seed=step):
            module(batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    return {f"weight/{name}": p.detach() for name, p in module.named_parameters()}, norms


def split(world: Group, stage: int, steps: int, given: dict[str, Tensor] | None) -> Any:
    mesh = Mesh.build(world, 2)
    data, accumulation = mesh.data_group.size, 2 // mesh.data_group.size
    engine = small_engine(
        world, stage, module=split_model(mesh.tensor_group), tensor_size=2, clipping=CLIPPING, accumulation=accumulation
    )
    if given is not None:
        engine.load(FullTensors(given.__getitem__), 1)
    start, norms = whole(engine), []
    for step in range(steps):
        for batch in small_batches([7, 2], data * accumulation / 9, seed=step)[mesh.data_group.rank :: data]:
            engine.micro_step(batch)
        norms.append(engine.step(0.01).grad_norm)
    return start, whole(engine), norms


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), long(0, 4), (1, 4), (2, 2), long(2, 4), (3, 2), long(3, 4)])
def test_two_tensor_ranks_equal_plain_torch_and_tell_whole_tensors(stage: int, ranks: int) -> None:
    weights, norms = plain(4)
    assert min(norms) > CLIPPING
    for _, tensors, split_norms in on_ranks(ranks, split, stage, 4, None):
        assert split_norms == pytest.approx(norms, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(tensors[name], weight, rtol=0, atol=2e-6)


def one_bad_slice(world: Group, stage: int, precision: str) -> tuple[bool, list[str], bool]:
    """A step in which one rank alone has a gradient that is not finite, in a slice; then a good one."""
    mesh = Mesh.build(world, 2)
    engine = small_engine(world, stage, precision, module=split_model(mesh.tensor_group), tensor_size=2)
    before, (batch,) = whole(engine), small_batches([7], 1 / 7, seed=mesh.data_group.rank)
    factor = float("nan") if world.rank == world.size - 1 else 1.0
    spoiled = engine.module.up.weight.register_hook(lambda grad: grad * factor)
    engine.micro_step(batch)
    bad = engine.step(0.01).applied
    unchanged = differing(before, whole(engine))
    spoiled.remove()
    engine.micro_step(batch)
    return bad, unchanged, engine.step(0.01).applied


@pytest.mark.parametrize("precision", ["fp32", long("bf16")])
@pytest.mark.parametrize("stage", [0, 1, long(2), 3])
def test_a_gradient_that_is_not_finite_on_one_tensor_rank_stops_the_step_on_all(stage: int, precision: str) -> None:
    for outcome in on_ranks(4, one_bad_slice, stage, precision):
        assert outcome == (False, [], True)


def one_rank(group: Group) -> dict[str, Tensor]:
    engine = small_engine(group, 0)
    engine.micro_step(small_batches([7], 1 / 7, seed=3)[0])
    engine.step(0.01)
    return whole(engine)


@pytest.mark.parametrize("stage", [long(0), 1, 3])
def test_tensor_ranks_load_what_one_rank_left(stage: int) -> None:
    left = on_ranks(1, one_rank)[0]
    for loaded, later, _ in on_ranks(4, split, stage, 1, left):
        assert differing(left, loaded) == []
        assert len(differing(left, later)) == len(left)
