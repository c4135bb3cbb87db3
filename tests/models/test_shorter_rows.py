"""Tokens that some layers compute alone: against the definition, document by document, without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.models.families import build_backbone

SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40, "vocab_size": 61}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
    "modernbert": {"family": "modernbert", "global_every": 2, "local_window": 4},
}
ROWS, LENGTH = 3, 12
Part = tuple[range, bool]


def encoder(family: str) -> Backbone:
    torch.manual_seed(0)
    model = build_backbone(ModelConfig(**SHAPE, **FAMILIES[family])).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def definition(model: Backbone, x_TD: Tensor, parts: list[tuple[Part, Tensor]]) -> Tensor:
    """[T, D]: of one document alone; of each part (its layers, whether the first of them reads all), bool [T]: kept."""
    whole = Documents.whole_rows(1, len(x_TD))
    x = model.initial_hidden(x_TD[None], whole)
    for layer, block in enumerate(model.blocks):
        inside = [(layers, reads_all, kept_T) for (layers, reads_all), kept_T in parts if layer in layers]
        if not inside:
            x = block(x, *model.block_arguments(whole)[layer])
            continue
        (layers, reads_all, kept_T) = inside[0]
        if layer == layers.start and reads_all:
            alone = block(x, *model.block_arguments(whole)[layer])[:, kept_T]
        else:
            places, starts = torch.arange(len(x_TD))[kept_T][None], torch.tensor([0, int(kept_T.sum())])
            view = model.block_arguments(Documents(places, starts, one_per_row=True))[layer]
            alone = block(x[:, kept_T], *view)
        x = x.clone()  # the others are what they were
        x[:, kept_T] = alone
    return model.apply_final_norm(x)[0]


def without(*places: list[int]) -> Tensor:
    """bool [B, T]: all but these places of each row."""
    kept_BT = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    for row, some in enumerate(places):
        kept_BT[row, some] = False
    return kept_BT


DIFFERING, ALIKE = without([0, 3, 6, 8], [2, 10], [1, 4, 11]), without([0, 3, 6, 8], [2, 9, 10, 11], [1, 2, 4, 11])
FEW = without([3, 4, 7], [3, 4, 9], [3, 4, 11])


@pytest.mark.parametrize(
    "parts",
    [
        [((range(1), False), DIFFERING)],
        [((range(2), False), DIFFERING)],
        [((range(1), True), ALIKE)],
        [((range(1, 3), True), ALIKE)],
        [((range(3), True), DIFFERING)],
        [((range(1), False), DIFFERING), ((range(1, 3), True), FEW)],
    ],
    ids=lambda parts: " ".join(str(part) for part, _ in parts),
)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("ends", [[12, 12, 12], [5, 12, 7]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_some_layers_compute_the_kept_tokens_alone(
    family: str, ends: list[int], few: bool, parts: list[tuple[Part, Tensor]]
) -> None:
    """Rows of one or two documents, with differing or equal numbers of tokens that pass by."""
    model = encoder(family)
    x = torch.randn(ROWS, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    positions = torch.stack([torch.cat([torch.arange(end), torch.arange(LENGTH - end)]) for end in ends])
    documents = Documents.whole_rows(ROWS, LENGTH) if ends == [12] * 3 else Documents(positions)
    index = (~DIFFERING).flatten().nonzero().flatten()
    targets = TargetPositions(index, ROWS, LENGTH, 4 if few else None)
    subsets = []
    for (layers, reads_all), kept_BT in parts:
        kept = TargetPositions(kept_BT.flatten().nonzero().flatten(), ROWS, LENGTH, int(kept_BT.sum(1).max()))
        subsets.append(TokenSubset(kept, layers, reads_all))
    found = model.encode_at(x, documents, targets, subsets)
    expected = torch.cat(
        [
            definition(model, x[row, at], [(part, kept_BT[row, at]) for part, kept_BT in parts])
            for row, end in enumerate(ends)
            for at in (slice(0, end), slice(end, LENGTH))
            if at.start < LENGTH
        ]
    )[index]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine, theirs = (torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
