"""The BERT backbone: it sees both sides, never another document; published sizes."""

from __future__ import annotations

import pytest
import torch

from megahead.config.model import ModelConfig
from megahead.models.documents import Documents, TargetPositions
from megahead.models.families import Bert, build_backbone
from support.initialized import initialized_backbone

TINY = ModelConfig(
    family="bert",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    vocab_size=50,
    vocab_multiple=8,
    max_positions=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
WITHOUT_POOLER = {"bert-base": 109_482_240 - 590_592, "bert-small": 28_763_648 - 262_656}
"""Of the published models with their 30,522 ids, less the pooler."""


def tiny(config: ModelConfig = TINY) -> Bert:
    backbone, generator = initialized_backbone(config, 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    assert isinstance(backbone, Bert)
    return backbone


@pytest.mark.parametrize("packed", [True, False])
def test_each_token_sees_its_whole_document_and_nothing_else(packed: bool) -> None:
    backbone = tiny()
    documents = Documents(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])) if packed else Documents.whole_rows(1, 8)
    rows = backbone.embed(torch.arange(8)[None]).detach().requires_grad_()
    hidden = backbone.encode(rows, documents)
    for at in range(8):
        (gradient,) = torch.autograd.grad(hidden[0, at, 0], rows, retain_graph=True)
        seen = (gradient[0].abs().sum(-1) > 0).tolist()
        first, last = (4 * (at // 4), 4 * (at // 4) + 4) if packed else (0, 8)
        assert seen == [first <= token < last for token in range(8)]


def test_a_document_gives_the_same_alone_and_among_others() -> None:
    backbone = tiny()
    ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    documents = Documents(torch.cat([torch.arange(5), torch.arange(7), torch.arange(4)])[None])
    torch.testing.assert_close(backbone(ids, documents)[:, 5:12], backbone(ids[:, 5:12]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [[], [0], [3, 4, 5, 20, 31], list(range(32))])
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_at_some_positions_are_those_of_all(targets: list[int], packed: bool) -> None:
    backbone = tiny()
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, 16)
    documents = Documents(positions) if packed else Documents.whole_rows(2, 16)
    index = torch.tensor(targets, dtype=torch.int64)
    most = max((sum(t // 16 == row for t in targets) for row in (0, 1)), default=0)
    some = backbone.encode_at(backbone.embed(ids), documents, TargetPositions(index, 2, 16, most))
    torch.testing.assert_close(some, backbone(ids, documents).flatten(0, 1)[index], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", list(WITHOUT_POOLER))
def test_named_sizes_have_the_published_parameters(size: str) -> None:
    with torch.device("meta"):
        backbone = build_backbone(ModelConfig(size=size, vocab_size=30522, vocab_multiple=1))
    assert sum(parameter.numel() for parameter in backbone.parameters()) == WITHOUT_POOLER[size]


def test_the_multilingual_shape_is_distilberts() -> None:
    with torch.device("meta"):
        backbone = build_backbone(ModelConfig(size="distilbert-multilingual", vocab_size=119547, vocab_multiple=1))
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 134_734_080


def test_recomputed_blocks_give_the_same_gradients() -> None:
    backbone, ids = tiny(), torch.arange(32).view(2, 16)
    targets = TargetPositions(torch.tensor([1, 2, 20]), 2, 16, max_per_row=2)
    grads = []
    for recompute in (False, True):
        backbone.recompute_blocks = recompute
        backbone.zero_grad()
        backbone.encode_at(backbone.embed(ids), Documents.whole_rows(2, 16), targets).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in backbone.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rotary_pct": 0.25}, "`rotary_pct` must be left out of a bert"),
        ({"parallel_residual": True}, "`parallel_residual` must be left out of a bert"),
        ({"family": "gpt_neox", "token_types": 2}, "`token_types` must be left out of a gpt_neox"),
    ],
)
def test_settings_of_the_other_family_are_refused(settings, sentence: str) -> None:
    shape = {"family": "bert", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 9}
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        ModelConfig(**{**shape, **settings})
