"""Tokens that enter an encoder later: against the definition, document by document, without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config import ModelConfig
from megahead.models import build_backbone
from megahead.models.encoder import Encoder
from megahead.nn import Documents, LateTokens, TargetPositions

SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40, "vocab_size": 61}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "global_every": 1},
}
ROWS, LENGTH = 3, 12


def encoder(family: str) -> Encoder:
    torch.manual_seed(0)
    model = build_backbone(ModelConfig(**SHAPE, **FAMILIES[family])).double()
    assert isinstance(model, Encoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def definition(model: Encoder, x_TD: Tensor, early_T: Tensor, layers: int) -> Tensor:
    """[T, D]: of one document alone, which has some early token."""
    documents = Documents.whole_rows(1, len(x_TD))
    embedded = model.embedded(x_TD[None], documents)
    short = Documents(torch.arange(len(x_TD))[early_T][None], torch.tensor([0, int(early_T.sum())]), one_per_row=True)
    x = embedded[:, early_T]
    for block, view in zip(model.blocks[:layers], model.views(short)[:layers], strict=True):
        x = block(x, *view)
    whole = embedded.clone()
    whole[:, early_T] = x
    for block, view in zip(model.blocks[layers:], model.views(documents)[layers:], strict=True):
        whole = block(whole, *view)
    return model.normed(whole)[0]


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ends", [[12, 12, 12], [5, 12, 7]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_early_layers_see_the_other_tokens_alone(family: str, ends: list[int], layers: int, few: bool) -> None:
    """Rows of one or two documents, with differing numbers of late tokens."""
    model = encoder(family)
    x = torch.randn(ROWS, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    positions = torch.stack([torch.cat([torch.arange(end), torch.arange(LENGTH - end)]) for end in ends])
    documents = Documents.whole_rows(ROWS, LENGTH) if ends == [12] * 3 else Documents(positions)
    late = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    late[0, [0, 3, 6, 8]] = late[1, [2, 10]] = late[2, [1, 4, 11]] = True
    index = late.flatten().nonzero().flatten()
    early = TargetPositions((~late).flatten().nonzero().flatten(), ROWS, LENGTH, int((~late).sum(1).max()))
    targets = TargetPositions(index, ROWS, LENGTH, 4 if few else None)
    found = model.encode_at(x, documents, targets, LateTokens(early, layers))
    parts = [
        definition(model, x[row, part], ~late[row, part], layers)
        for row, end in enumerate(ends)
        for part in (slice(0, end), slice(end, LENGTH))
        if part.start < LENGTH
    ]
    expected = torch.cat(parts)[index]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine, theirs = (torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
