"""The GPT-NeoX backbone: causal, documents apart, published sizes, built without memory."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from megahead.config.model import NAMED_SIZES, ModelConfig
from megahead.models.documents import Documents
from megahead.models.families import SHARDING, build_backbone
from support.initialized import initialize_, initialized_backbone

TINY = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=50, vocab_multiple=8)
NON_EMBEDDING = {
    "pythia-70m": 18_915_328,
    "pythia-160m": 85_056_000,
    "pythia-410m": 302_311_424,
    "pythia-1b": 805_736_448,
    "pythia-1.4b": 1_208_602_624,
    "pythia-2.8b": 2_517_652_480,
    "pythia-6.9b": 6_444_163_072,
    "pythia-12b": 11_327_027_200,
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def tiny(config: ModelConfig = TINY, seed: int = 0):
    backbone = initialized_backbone(config, seed)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return backbone


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_no_gradient_flows_to_later_tokens(parallel, packed):
    backbone = tiny(TINY.model_copy(update={"parallel_residual": parallel}))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])) if packed else Documents.whole_rows(1, 8)
    rows = backbone.embed(torch.randint(0, 50, (1, 8))).detach().requires_grad_()
    hidden = backbone.encode(rows, documents)
    for at in range(8):
        (gradient,) = torch.autograd.grad(hidden[0, at, 0], rows, retain_graph=True)
        first = 4 * (at // 4) if packed else 0
        seen = gradient[0].abs().sum(-1) > 0
        assert seen.tolist() == [first <= token <= at for token in range(8)]


def test_a_document_does_not_feel_the_others_in_its_row():
    backbone = tiny()
    documents = Documents(torch.cat([torch.arange(5), torch.arange(7), torch.arange(4)])[None])
    ids = torch.randint(0, 50, (1, 16))
    middle = backbone(ids, documents)[:, 5:12]
    changed = (ids + 1) % 50
    changed[:, 5:12] = ids[:, 5:12]
    assert torch.equal(backbone(changed, documents)[:, 5:12], middle)
    alone = backbone(ids[:, 5:12])
    torch.testing.assert_close(alone, middle, rtol=1e-5, atol=1e-5)


def test_without_documents_a_row_is_one():
    backbone = tiny()
    ids = torch.randint(0, 50, (3, 9))
    documents = Documents(torch.arange(9).expand(3, 9))
    torch.testing.assert_close(backbone(ids), backbone(ids, documents), rtol=1e-5, atol=1e-5)


def test_distance_is_that_of_positions_not_of_columns():
    backbone = tiny()
    ids = torch.randint(0, 50, (1, 4))
    near, far = (backbone(ids, Documents(torch.tensor([[0, 1, 2, place]]))) for place in (3, 9))
    assert torch.equal(near[:, :3], far[:, :3])
    assert not torch.allclose(near[:, 3], far[:, 3], atol=1e-3)


def test_forward_is_encode_of_embed_and_embed_takes_any_shape():
    backbone = tiny()
    ids = torch.randint(0, 50, (2, 6))
    assert torch.equal(backbone(ids), backbone.encode(backbone.embed(ids), Documents.whole_rows(2, 6)))
    assert backbone.embed(ids.flatten()).shape == (12, 32)


@pytest.mark.parametrize("packed", [True, False])
def test_half_precision_stays_close(packed):
    backbone = tiny()
    ids = torch.randint(0, 50, (2, 12))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2)) if packed else None
    exact = backbone(ids, documents)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = backbone(ids, documents)
    half = backbone.bfloat16()(ids, documents)
    assert half.dtype == torch.bfloat16
    for found in (mixed, half):
        torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


def test_hidden_dropout_acts_in_training_only():
    backbone = tiny(TINY.model_copy(update={"hidden_dropout": 0.3}))
    ids = torch.randint(0, 50, (2, 6))
    assert not torch.equal(backbone(ids), backbone(ids))
    backbone.eval()
    torch.testing.assert_close(backbone(ids), tiny()(ids))


@pytest.mark.parametrize("size", list(NON_EMBEDDING))
def test_named_sizes_have_the_published_parameters(size):
    with torch.device("meta"):
        backbone = build_backbone(ModelConfig(size=size, vocab_size=50277))
    body = sum(parameter.numel() for name, parameter in backbone.named_parameters() if not name.startswith("embedding"))
    assert body == NON_EMBEDDING[size]
    assert set(NAMED_SIZES) >= set(NON_EMBEDDING)


def test_built_on_meta_then_initialised_equals_built_in_place():
    with torch.device("meta"):
        backbone = build_backbone(TINY)
    assert all(parameter.is_meta for parameter in backbone.parameters())
    backbone.to_empty(device="cpu")
    initialize_(backbone, 5, TINY)
    direct = initialized_backbone(TINY, 5)
    ids = torch.randint(0, 50, (2, 6))
    assert torch.equal(backbone(ids), direct(ids))


def test_parameter_names_are_the_checkpoints_names():
    block = [f"{part}.{kind}" for part in _BLOCK_PARTS for kind in ("weight", "bias")]
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in block]
    expected = ["embedding.weight", *blocks, "final_norm.weight", "final_norm.bias"]
    backbone = build_backbone(TINY)
    assert [name for name, _ in backbone.named_parameters()] == expected
    assert list(backbone.state_dict()) == expected


_BLOCK_PARTS = ("attention_norm", "attention.qkv", "attention.output", "mlp_norm", "mlp.up", "mlp.down")


def test_sharding_table_names_every_matrix_and_every_norm_of_the_model():
    modules = dict(build_backbone(TINY).named_modules())
    named = {"norm": set(), "matrix": set()}
    for pattern, kind in SHARDING["gpt_neox"].items():
        if kind not in ("heads", "tokens"):
            named["norm" if kind == "norm" else "matrix"].update(fnmatch.filter(modules, pattern))
    assert named["norm"] == {name for name, module in modules.items() if isinstance(module, torch.nn.LayerNorm)}
    assert named["matrix"] == {name for name, module in modules.items() if _holds_matrix(module)}


def _holds_matrix(module: torch.nn.Module) -> bool:
    return any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))
