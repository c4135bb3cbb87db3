"""A table of rows: what it looks up, what it keeps, and the gradient by which it counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megahead.config.training import OptimizerConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from megahead.errors import CheckpointError
from megahead.models.parallel import VocabularyParallelEmbedding
from megahead.sharded_embedding import table as table_module
from megahead.sharded_embedding.optimizer import ROW_OPTIMIZERS
from megahead.sharded_embedding.table import OwnedRows, ShardedEmbedding, plan_rows, vector_with_norm
from support.on_ranks import on_ranks

CPU, ROWS, WIDTH = torch.device("cpu"), 29, 4
CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0.0, 1e-4, 0.37, 1.0, 12345.678, 3e5])
def test_a_vector_has_its_length_in_any_format(dtype: torch.dtype, length: float) -> None:
    vector = vector_with_norm(torch.tensor(length, dtype=torch.float64), torch.zeros(4096, dtype=dtype))
    coarse = dtype == torch.float16 and length / 64 < 1e-4  # below fp16's normal numbers
    assert float(vector.double().norm()) == pytest.approx(length, rel=1e-3 if coarse else 1e-5)


@pytest.mark.parametrize("length", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(length: float) -> None:
    assert not vector_with_norm(torch.tensor(length), torch.zeros(4096, dtype=torch.bfloat16)).isfinite().any()


def whole_table() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def table_of(mesh: Mesh) -> ShardedEmbedding:
    table = ShardedEmbedding(ROWS, WIDTH, ROW_OPTIMIZERS["adamw"](CONFIG), mesh, CPU)
    table.load_rows_([whole_table()])
    return table


def looked_up_while_evaluating(group: Group) -> tuple[bool, bool]:
    """Ids and blocks of rows, before and after a step."""
    table, ids = table_of(Mesh.build(group)), torch.tensor([[3, 7], [3, 20 + group.rank]])
    table.fetch(plan_rows(ids, group.new_gloo_group()))
    table(ids).square().sum().backward()
    table.step(0.1, 1.0)
    table.eval()
    whole = torch.cat([block.clone() for block in table.weight_blocks(ROWS - 2)])
    moved = (whole - whole_table()[: ROWS - 2]).abs().sum(1) > 0.05
    expected = {3, 7} | {20 + rank for rank in range(group.size)}
    return torch.equal(table(ids), whole[ids]), set(moved.nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("block", [4, 1 << 14])
def test_evaluation_sees_rows_as_they_are_now(ranks: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_BLOCK_ROWS", block)
    assert on_ranks(ranks, looked_up_while_evaluating) == [(True, True)] * ranks


def beside_the_split_embedding(group: Group) -> tuple[bool, float]:
    """Rows and gradients of a split table, and of the split embedding that it stands for."""
    mesh = Mesh.build(group, 2)
    ids, shared = torch.tensor([[1, 5, 1], [8, 28, 0]]) + mesh.data_group.rank, torch.tensor([5, 9, 28, -1])
    full = nn.Embedding.from_pretrained(torch.cat([whole_table(), torch.zeros(1, WIDTH)]), freeze=False)
    split, table = VocabularyParallelEmbedding(full, mesh.tensor_group), table_of(mesh)
    ids = ids.clamp_max(ROWS - 1)
    asked = torch.cat([ids.flatten(), shared.clamp_min(0)])
    table.fetch(plan_rows(asked, group.new_gloo_group(), tensor_group=mesh.tensor_group))
    outcomes = [each(ids, shared) for each in (split, table)]
    for inputs, rows in outcomes:
        (inputs.square().sum() + (rows**3).sum() * (1 + mesh.tensor_group.rank)).backward()
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(*outcomes, strict=True))
    dense = mesh.tensor_group.unshard(mesh.data_group.all_reduce_(split.weight.grad) / mesh.data_group.size, 0)[:ROWS]
    length = float(table.grad_norm_proxy.grad.double().norm())
    return same, abs(length / float(dense.double().norm()) - 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_table_is_a_split_embedding(ranks: int) -> None:
    for same, apart in on_ranks(ranks, beside_the_split_embedding):
        assert same
        assert apart < 1e-5


def as_new(owned: OwnedRows) -> OwnedRows:
    owned.rows["weight"].copy_(whole_table()[:6])
    owned.reset_steps()
    return owned


def moved(owned: OwnedRows, steps: int) -> OwnedRows:
    for step in range(steps):
        places = torch.tensor([step % 3, 3])
        taken = owned.gather(places)
        owned.row_optimizer.step_(taken, torch.ones(2, WIDTH), 0.1)
        owned.scatter(places, taken)
    return owned


@pytest.mark.parametrize(
    ("rule", "widths"), [("adamw", [WIDTH, WIDTH, WIDTH]), ("adamw_row", [WIDTH, WIDTH, 1]), ("adagrad", [WIDTH, 1])]
)
def test_a_rule_s_moments_are_as_wide_as_it_says(rule: str, widths: list[int]) -> None:
    owned = OwnedRows(6, WIDTH, ROW_OPTIMIZERS[rule](CONFIG), CPU)
    assert [values.shape for values in owned.rows.values()] == [(6, width) for width in widths]


def test_reading_rows_leaves_no_trace() -> None:
    owned = moved(as_new(OwnedRows(6, WIDTH, ROW_OPTIMIZERS["adamw"](CONFIG), CPU)), 5)
    before = {name: values.clone() for name, values in owned.rows.items()}, owned.last_step_n.clone()
    now = torch.cat(list(owned.blocks()))
    assert all(torch.equal(before[0][name], values) for name, values in owned.rows.items())
    assert torch.equal(before[1], owned.last_step_n)
    assert owned.count_stale(torch.arange(6)) == 4
    assert (now[2] != before[0]["weight"][2]).all()
    assert torch.equal(now[3], before[0]["weight"][3])


def test_rows_of_another_rule_are_refused() -> None:
    saved, other = (
        ShardedEmbedding(ROWS, WIDTH, ROW_OPTIMIZERS[rule](CONFIG), Mesh.build(Group()), CPU)
        for rule in ("adamw", "adamw_row")
    )
    shards = {name: getattr(shard, "part", shard) for name, shard in saved.state().items()}
    with pytest.raises(CheckpointError, match=r"must be \[1\] for each row, but is \[4\]; .*optimizer\.table\.rule"):
        other.restore(FullTensors(shards.__getitem__))


def test_rows_that_are_filled_again_have_forgotten_all_steps() -> None:
    fresh, used = (OwnedRows(6, WIDTH, ROW_OPTIMIZERS["adamw"](CONFIG), CPU) for _ in range(2))
    moved(used, 5)
    for owned in (fresh, used):
        as_new(owned)
    assert (used.steps, used.count_stale(torch.arange(6))) == (0, 0)
    moved(fresh, 4)
    moved(used, 4)
    assert all(torch.equal(values, used.rows[name]) for name, values in fresh.rows.items())
    assert torch.equal(fresh.last_step_n, used.last_step_n)
    assert len(fresh.row_optimizer.history.rates) == len(used.row_optimizer.history.rates) == 4
