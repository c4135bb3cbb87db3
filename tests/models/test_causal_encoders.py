"""An encoder with `is_causal`: no token sees a later one, in any way to compute attention, and weights are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.models.attention_backends import BACKENDS, AttentionFunction, AttentionSpec, attend
from megahead.models.backbone import Backbone
from megahead.models.blocks import set_attention
from megahead.models.documents import Documents, TargetPositions
from support.initialized import initialized_backbone

SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_heads": 2, "vocab_size": 50, "vocab_multiple": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "local_window": 4, "global_every": 2},
}
CPU = AttentionSpec(torch.device("cpu"), torch.float32, head_size=16, local=True)
WAYS = {"auto": attend} | {name: way.attend for name, way in BACKENDS.items() if not way.unsupported_reason(CPU)}
PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])


def encoder(family: str, way: AttentionFunction = attend, **settings: Any) -> Backbone:
    backbone = initialized_backbone(ModelConfig(**SHAPE | FAMILIES[family] | settings), 0)
    set_attention(backbone, way)
    return backbone


def documents_of(packed: bool) -> Documents:
    return Documents(PACKED) if packed else Documents.whole_rows(1, 11)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_come_from_what_precedes_in_the_document_alone(
    way: AttentionFunction, family: str, packed: bool
) -> None:
    backbone, begins = encoder(family, way, is_causal=True), 6 if packed else 0
    rows = backbone.embed(torch.arange(11)[None]).detach().requires_grad_()
    hidden = backbone.encode(rows, documents_of(packed))
    for at in range(11):
        (gradient,) = torch.autograd.grad(hidden[0, at, 0], rows, retain_graph=True)
        seen = [(begins if at >= begins else 0) <= token <= at for token in range(11)]
        assert (gradient[0].abs().sum(-1) > 0).tolist() == seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_token_changes_no_earlier_output(way: AttentionFunction, family: str, dtype: torch.dtype) -> None:
    """bf16 has a kernel of its own on CPUs."""
    backbone, ids = encoder(family, way, is_causal=True).to(dtype), torch.arange(12).view(1, 12)
    changed = ids.index_fill(1, torch.tensor([8]), 40)
    before, after = backbone(ids), backbone(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_see_both_sides_without_it(family: str) -> None:
    """In one layer the last token of a document sees the same either way, the others do not."""
    causal, both = encoder(family, is_causal=True, num_layers=1), encoder(family, num_layers=1)
    both.load_state_dict(causal.state_dict())
    ids, documents = torch.arange(11)[None], Documents(PACKED)
    apart: Tensor = (causal(ids, documents) - both(ids, documents)).abs().amax(-1)[0]
    assert (apart < 1e-5).tolist() == [at in (5, 10) for at in range(11)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_at_some_positions_are_those_of_all(family: str, packed: bool) -> None:
    backbone, ids = encoder(family, is_causal=True), torch.arange(11)[None]
    index = torch.tensor([2, 6, 7, 9])
    some = backbone.encode_at(backbone.embed(ids), documents_of(packed), TargetPositions(index, 1, 11, 4))
    torch.testing.assert_close(some, backbone(ids, documents_of(packed))[0, index], rtol=1e-5, atol=1e-5)
