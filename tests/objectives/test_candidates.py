"""Candidates in other shapes mean the same."""

from __future__ import annotations

import pytest
import torch

from megahead.objectives import candidate_loss, unique_candidates, vocabulary_candidates


@pytest.mark.parametrize("multiple", [1, 5, 16])
def test_padded_candidates_give_the_same_loss_and_gradients(multiple: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(40, (30,), generator=generator)
    outputs = torch.randn(30, 8, generator=generator, requires_grad=True)
    table = torch.randn(40, 8, generator=generator, requires_grad=True)
    results = []
    for candidates in (unique_candidates(targets), unique_candidates(targets).padded(multiple)):
        assert candidates.ids_U is not None
        loss = candidate_loss(outputs, table[candidates.ids_U], candidates)
        results.append((loss, *torch.autograd.grad(loss, [outputs, table])))
        rows = candidates.ids_U.numel()
    assert rows % multiple == 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_whole_vocabulary_is_not_padded() -> None:
    candidates = vocabulary_candidates(torch.tensor([1, 2]))
    assert candidates.padded(512) is candidates
