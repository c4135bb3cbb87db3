"""Parallel layers compute what their plain layers do, values and gradients, at 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.models.documents import Documents
from megahead.models.families import SHARDING, build_backbone
from megahead.models.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    parallelize_,
    shard_dims,
)
from megahead.objectives.pretraining import load_weights_
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

IDS = torch.tensor([[3, 0, 15], [7, 3, 8]])
SHARED = torch.tensor([2, 3, 15, -1])


def plain() -> tuple[nn.Linear, nn.Linear, nn.Embedding]:
    torch.manual_seed(0)
    return (
        nn.Linear(6, 8, dtype=torch.float64),
        nn.Linear(8, 6, dtype=torch.float64),
        nn.Embedding(16, 6, dtype=torch.float64),
    )


def through(up: nn.Module, down: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = down(torch.tanh(up(rows)))
    return output


def sharded(group: Group) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, this rank's share of the shared rows, and whole gradients."""
    up, down, embedding = plain()
    layers = nn.ModuleDict(
        {
            "up": ColumnParallelLinear(up, group),
            "down": RowParallelLinear(down, group),
            "embedding": VocabularyParallelEmbedding(embedding, group),
        }
    )
    rows, shared = layers["embedding"](IDS, SHARED)
    output = through(layers["up"], layers["down"], rows)
    weights = torch.arange(24.0, dtype=torch.float64).view(4, 6).chunk(group.size)[group.rank]
    (output.square().sum() + (shared * weights).sum()).backward()
    dims = shard_dims(layers)
    grads = {
        name: p.grad if name not in dims else torch.cat(group.all_gather(p.grad).unbind(), dims[name])
        for name, p in layers.named_parameters()
    }
    assert {name for name, p in layers.named_parameters() if hasattr(p, "model_parallel")} == set(dims)
    return output.detach(), shared.detach(), grads


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_lookup_and_a_pair_of_linears_equal_one_rank(size: int) -> None:
    up, down, embedding = plain()
    output = through(up, down, embedding(IDS))
    shared = torch.cat([embedding(SHARED[:3]), torch.zeros(1, 6, dtype=torch.float64)])
    (output.square().sum() + (shared * torch.arange(24.0, dtype=torch.float64).view(4, 6)).sum()).backward()
    layers = nn.ModuleDict({"up": up, "down": down, "embedding": embedding})
    results = on_ranks(size, sharded)
    torch.testing.assert_close(torch.cat([shared for _, shared, _ in results]), shared.detach())
    for outputs, _, grads in results:
        torch.testing.assert_close(outputs, output.detach())
        for name, parameter in layers.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)


def test_a_pattern_that_matches_nothing_or_the_wrong_layer_is_an_error() -> None:
    backbone = build_backbone(small_config().model)
    with pytest.raises(ValueError, match=r"blocks\.\*\.attention\.query"):
        parallelize_(backbone, {"blocks.*.attention.query": "column"}, Group())
    with pytest.raises(ValueError, match="final_norm must be a Linear"):
        parallelize_(backbone, {"final_norm": "row"}, Group())


@pytest.mark.parametrize("size", [3])
def test_a_backbone_in_parts_gives_the_hidden_states_of_the_whole(size: int) -> None:
    """Three heads on three ranks: attention works with the heads that are there."""
    config = small_config(model={"vocab_multiple": 48})
    torch.manual_seed(1)
    whole = build_backbone(config.model).double()
    for parameter in whole.parameters():
        parameter.data.normal_(std=0.3)
    ids = torch.randint(61, (2, 9))
    documents = Documents(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8]]))

    def in_parts(group: Group) -> Tensor:
        backbone = build_backbone(config.model).double()
        parallelize_(backbone, SHARDING["gpt_neox"], group)
        load_weights_(backbone, group, FullTensors(whole.get_parameter))
        hidden: Tensor = backbone(ids, documents)
        return hidden.detach()

    for hidden in on_ranks(size, in_parts):
        torch.testing.assert_close(hidden, whole(ids, documents).detach(), rtol=0, atol=1e-10)
