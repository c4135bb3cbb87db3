"""Compiled blocks: what plain ones compute, one compilation for all layers, and a way on where it fails."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from megahead.config.model import ModelConfig
from megahead.models.attention_backends import BACKENDS
from megahead.models.backbone import Backbone
from megahead.models.blocks import CompiledBlocks, set_attention
from megahead.models.documents import Documents, TargetPositions
from support.initialized import initialized_backbone

IDS = torch.arange(2 * 24).view(2, 24) % 50
POSITIONS = torch.cat([torch.arange(24), torch.arange(9), torch.arange(15)]).view(2, 24)


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny(family: str = "gpt_neox", dropout: float = 0.0) -> Backbone:
    shape = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "vocab_size": 50}
    shape |= {"local_window": 8} if family == "modernbert" else {}
    config = ModelConfig(family=family, **shape, hidden_dropout=dropout, attention_dropout=dropout)
    backbone = initialized_backbone(config, 1)
    return backbone


def trained(backbone: Backbone, positions: Tensor | None = None) -> list[Tensor]:
    """Hidden states and all gradients."""
    torch.manual_seed(3)
    backbone.zero_grad()
    hidden = backbone(IDS, None if positions is None else Documents(positions))
    hidden.square().sum().backward()
    return [hidden.detach(), *(p.grad for p in backbone.parameters() if p.grad is not None)]


class Counting:
    """Compiles nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> nn.Module:
        self.graphs += 1
        return graph


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gemma3", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recompute", [False, True])
def test_one_graph_serves_all_layers_and_computes_the_same(family: str, dropout: float, recompute: bool) -> None:
    backbone, counting = tiny(family, dropout), Counting()
    backbone.recompute_blocks = recompute
    set_attention(backbone, BACKENDS["sdpa"].attend)
    expected = trained(backbone)
    backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
    for found, tensor in zip(trained(backbone), expected, strict=True):
        torch.testing.assert_close(found, tensor)
    assert counting.graphs == 1


def test_more_global_and_local_layers_need_no_more_graphs() -> None:
    graphs = []
    for layers in (6, 9):
        torch._dynamo.reset()
        shape = {"num_layers": layers, "hidden_size": 32, "num_heads": 2, "vocab_size": 50, "local_window": 4}
        backbone, counting = initialized_backbone(ModelConfig(family="modernbert", **shape), 1), Counting()
        set_attention(backbone, BACKENDS["sdpa"].attend)
        expected = trained(backbone, POSITIONS)
        backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
        for found, tensor in zip(trained(backbone, POSITIONS), expected, strict=True):
            torch.testing.assert_close(found, tensor)
        assert not backbone.compiled.unsupported_reason
        graphs.append(counting.graphs)
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize("key_heads", [1, 2])
def test_packed_documents_and_shared_keys_are_in_the_one_graph(key_heads: int) -> None:
    shape = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_key_heads": key_heads, "vocab_size": 50}
    backbone, counting = initialized_backbone(ModelConfig(family="llama", **shape), 1), Counting()
    set_attention(backbone, BACKENDS["sdpa"].attend)
    expected = trained(backbone, POSITIONS)
    backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
    for found, tensor in zip(trained(backbone, POSITIONS), expected, strict=True):
        torch.testing.assert_close(found, tensor)
    assert counting.graphs == 1
    assert not backbone.compiled.unsupported_reason


def test_documents_of_other_lengths_are_not_compiled_for() -> None:
    backbone, counting = tiny(), Counting()
    expected = [trained(backbone, POSITIONS), trained(backbone, POSITIONS.flip(0))]
    set_attention(backbone, torch.compiler.disable(BACKENDS["documents"].attend))
    backbone.compiled = CompiledBlocks(backend=counting)
    for tensor, found in zip(expected[0], trained(backbone, POSITIONS), strict=True):
        torch.testing.assert_close(found, tensor)
    graphs = counting.graphs
    for tensor, found in zip(expected[1], trained(backbone, POSITIONS.flip(0)), strict=True):
        torch.testing.assert_close(found, tensor)
    assert counting.graphs == graphs


@pytest.mark.parametrize(("family", "graphs"), [("gpt_neox", 1), ("bert", 1), ("modernbert", 3)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_kernel_for_documents_is_part_of_the_graph_however_many_they_are(
    family: str, graphs: int, dropout: float
) -> None:
    """As on a GPU, on no device: shapes alone. Two batches, of 2 and of 3 documents, their boundaries padded."""
    backbone, counting = tiny(family, dropout).to("meta"), Counting()
    set_attention(backbone, BACKENDS["varlen"].attend)
    backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
    for positions in (torch.arange(24).repeat(2, 1), POSITIONS):
        documents = Documents(positions.to("meta"), Documents(positions).padded_cu_seqlens(8).to("meta"))
        hidden = backbone(IDS.to("meta"), documents)
        hidden.sum().backward()
    assert counting.graphs == graphs
    assert not backbone.compiled.unsupported_reason


@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_flash_attention_is_part_of_the_graph(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A function in its place, which returns something of the right shape."""
    module, function = BACKENDS[name].kernel or ("", "")
    stand_in = types.ModuleType(module)
    monkeypatch.setattr(stand_in, function, lambda q, k, v, **_: q + k + v, raising=False)
    monkeypatch.setitem(sys.modules, module, stand_in)
    backbone, counting = tiny(), Counting()
    set_attention(backbone, BACKENDS[name].attend)
    documents = Documents(POSITIONS, Documents(POSITIONS).cu_seqlens)
    expected = backbone(IDS, documents)
    backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
    torch.testing.assert_close(backbone(IDS, documents), expected)
    assert counting.graphs == 1
    assert BACKENDS[name].is_traceable


def test_a_layer_that_computes_only_targets_is_not_compiled_for() -> None:
    """Their number differs from batch to batch."""
    backbone, counting = tiny("bert"), Counting()
    set_attention(backbone, BACKENDS["sdpa"].attend)
    backbone.compiled = CompiledBlocks(backend=counting, fullgraph=True)
    for number in (3, 5):
        targets = TargetPositions(torch.arange(number), *IDS.shape, max_per_row=number)
        assert len(backbone.encode_at(backbone.embed(IDS), Documents.whole_rows(*IDS.shape), targets)) == number
    assert counting.graphs == 1
    assert not backbone.compiled.unsupported_reason


def test_evaluation_is_not_compiled_for() -> None:
    backbone, counting = tiny().eval(), Counting()
    backbone.compiled = CompiledBlocks(backend=counting)
    backbone(IDS)
    assert counting.graphs == 0


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_generated_code_computes_the_same() -> None:
    backbone = tiny()
    set_attention(backbone, BACKENDS["sdpa"].attend)
    expected = trained(backbone)
    backbone.compiled = CompiledBlocks()
    for found, tensor in zip(trained(backbone), expected, strict=True):
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-4)
    assert not backbone.compiled.unsupported_reason


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_generated_code_for_packed_rows_in_bf16() -> None:
    """Of a size at which torch 2.13 gives the sums of two biases one name, unless it is kept from it."""
    config = ModelConfig(family="gpt_neox", num_layers=1, hidden_size=128, num_heads=4, vocab_size=50)
    backbone = initialized_backbone(config, 1).bfloat16()
    set_attention(backbone, BACKENDS["sdpa"].attend)
    ids, documents = torch.arange(16 * 256).view(16, 256) % 50, Documents(torch.arange(16 * 256).view(16, 256) % 100)
    weights, found = torch.randn(16, 256, 128, dtype=torch.bfloat16), []
    for backbone.compiled in (None, CompiledBlocks()):
        backbone.zero_grad()
        hidden = backbone(ids, documents)
        hidden.backward(weights)
        gradients = [p.grad for name, p in backbone.named_parameters() if "norm" not in name]
        found.append([hidden.detach(), *gradients])  # plain, torch sums gradients of norms in bf16
    assert backbone.compiled is not None
    assert not backbone.compiled.unsupported_reason
    for plain, compiled in zip(*found, strict=True):
        assert (plain - compiled).float().norm() < 0.02 * plain.float().norm()


def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> nn.Module:
    raise OSError("no space for kernels")


@pytest.mark.parametrize(
    "backend", [broken, aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=broken)], ids=["fwd", "bwd"]
)
def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(backend: Any) -> None:
    backbone = tiny()
    set_attention(backbone, BACKENDS["sdpa"].attend)
    expected = trained(backbone)
    backbone.compiled = CompiledBlocks(backend=backend)
    with pytest.warns(UserWarning, match="blocks are not compiled: .*no space for kernels"):
        found = trained(backbone)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert trained(backbone)[0].equal(expected[0])  # and does not try again
