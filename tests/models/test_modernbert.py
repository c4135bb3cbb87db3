"""The ModernBERT backbone: how far its tokens see, published sizes, a sharding table of all it has."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from megahead.config.model import ModelConfig
from megahead.models.documents import Documents, TargetPositions
from megahead.models.families import SHARDING, ModernBert, build_backbone
from support.initialized import initialized_backbone

SHAPE: dict[str, Any] = {
    **{"family": "modernbert", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 50},
    **{"vocab_multiple": 8, "local_window": 4},
}


def tiny(**settings: Any) -> ModernBert:
    backbone, generator = initialized_backbone(ModelConfig(**SHAPE | settings), 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    assert isinstance(backbone, ModernBert)
    return backbone


@pytest.mark.parametrize("packed", [True, False])
def test_the_last_layer_alone_decides_how_far_a_token_sees(packed: bool) -> None:
    """Of two layers the second is local; the first's own reading of the embeddings is cut off before it."""
    backbone = tiny()
    documents = Documents(torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])) if packed else Documents.whole_rows(1, 9)
    rows = backbone.embed(torch.arange(9)[None]).detach()
    whole, near = backbone.block_arguments(documents)
    first = (
        backbone.run_block(backbone.blocks[0], backbone.initial_hidden(rows, documents), *whole)
        .detach()
        .requires_grad_()
    )
    second = backbone.run_block(backbone.blocks[1], first, *near)
    for at in range(9):
        (gradient,) = torch.autograd.grad(second[0, at, 0], first, retain_graph=True)
        begin, end = (6 * (at // 6), 6 if at < 6 else 9) if packed else (0, 9)
        seen = [begin <= token < end and abs(token - at) <= 2 for token in range(9)]
        assert (gradient[0].abs().sum(-1) > 0).tolist() == seen


def test_a_global_layer_sees_the_whole_document_and_no_other() -> None:
    backbone = tiny(global_every=1)
    rows = backbone.embed(torch.arange(9)[None]).detach().requires_grad_()
    hidden = backbone.encode(rows, Documents(torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])))
    for at in range(9):
        (gradient,) = torch.autograd.grad(hidden[0, at, 0], rows, retain_graph=True)
        assert (gradient[0].abs().sum(-1) > 0).tolist() == [(token < 6) == (at < 6) for token in range(9)]


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("targets", [[], [0], [3, 4, 5, 20, 31], list(range(32))])
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_at_some_positions_are_those_of_all(layers: int, targets: list[int], packed: bool) -> None:
    """Whether the last block is a global one, as in the published sizes, or a local one."""
    backbone = tiny(num_layers=layers)
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, 16)
    documents = Documents(positions) if packed else Documents.whole_rows(2, 16)
    index = torch.tensor(targets, dtype=torch.int64)
    most = max((sum(t // 16 == row for t in targets) for row in (0, 1)), default=0)
    some = backbone.encode_at(backbone.embed(ids), documents, TargetPositions(index, 2, 16, most))
    torch.testing.assert_close(some, backbone(ids, documents).flatten(0, 1)[index], rtol=1e-5, atol=1e-5)


def test_recomputed_blocks_give_the_same_gradients() -> None:
    backbone, ids = tiny(num_layers=4, hidden_dropout=0.1, attention_dropout=0.1), torch.arange(32).view(2, 16)
    targets = TargetPositions(torch.tensor([1, 2, 20]), 2, 16, max_per_row=2)
    grads = []
    for recompute in (False, True, "selective"):
        torch.manual_seed(5)
        backbone.recompute_blocks = recompute
        backbone.zero_grad()
        backbone.encode_at(backbone.embed(ids), Documents.whole_rows(2, 16), targets).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in backbone.parameters()])
    for others in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], others, strict=True))


def test_half_precision_stays_close() -> None:
    backbone, ids = tiny(num_layers=3), torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2))
    exact = backbone(ids, documents)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = backbone(ids, documents)
    half = backbone.bfloat16()(ids, documents)
    for found in (mixed, half):
        torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.08)


@pytest.mark.parametrize(
    ("size", "vocabulary", "parameters"),
    [
        *[("modernbert-base", 50_368, 149_014_272), ("modernbert-large", 50_368, 394_781_696)],
        *[("mmbert-base", 256_000, 306_939_648), ("mmbert-small", 256_000, 140_493_696)],
        *[("roberta-base", 50_265, 124_055_040), ("xlm-r-base", 250_002, 277_453_056)],
    ],
)
def test_named_sizes_have_the_published_parameters(size: str, vocabulary: int, parameters: int) -> None:
    with torch.device("meta"):
        backbone = build_backbone(ModelConfig(size=size, vocab_size=vocabulary, vocab_multiple=1))
    assert sum(parameter.numel() for parameter in backbone.parameters()) == parameters


def test_the_sharding_table_names_every_matrix_and_every_norm() -> None:
    modules = dict(tiny().named_modules())
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for pattern, word in SHARDING["modernbert"].items():
        if word not in ("heads", "tokens"):
            named[word == "norm"].update(fnmatch.filter(modules, pattern))
    absent = {"blocks.0.attention_norm", *(f"blocks.{k}.attention.{x}_norm" for k in (0, 1) for x in ("query", "key"))}
    norms = {name for name, module in modules.items() if isinstance(module, nn.LayerNorm)}
    assert named[True] == norms | {"blocks.0.attention_norm"}
    assert {name for name, module in modules.items() if isinstance(module, nn.Identity)} == absent
    assert named[False] == {name for name, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)}


def test_weights_are_drawn_as_megatron_draws_them() -> None:
    backbone = initialized_backbone(ModelConfig(**SHAPE | {"num_layers": 8, "hidden_size": 128}), 0)
    for name, parameter in backbone.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        else:
            writes = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert float(parameter.detach().std()) == pytest.approx(0.02 / (4 if writes else 1), rel=0.05), name


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attention_bias": "all"}, "`attention_bias` must be left out of a modernbert"),
        ({"num_key_heads": 1}, "`num_key_heads` must be left out of a modernbert"),
        ({"local_window": 5}, "multiple of 2"),
        ({"family": "bert", "global_every": 3}, "`global_every` must be left out of a bert"),
        ({"family": "llama", "local_window": 64}, "`local_window` must be left out of a llama"),
        ({"activation": "silu"}, "`activation` must be gelu or gelu_tanh in a modernbert"),
    ],
)
def test_settings_of_other_families_are_refused(settings: dict[str, Any], sentence: str) -> None:
    shape = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9}
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(**{"family": "modernbert", **shape, **settings})
