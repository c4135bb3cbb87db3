"""The loss at the ends of masked phrases against its formula, one end and one token after another."""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.objectives.phrases import phrase_sums


def by_hand(ends: Tensor, candidates: Tensor, allowed: Tensor, right: Tensor, temperature: float) -> Tensor:
    """The sum over ends of minus the logarithm of the share that right tokens have."""
    total = ends.sum() * 0
    for q, end in enumerate(ends):
        above = below = torch.zeros((), dtype=ends.dtype)
        for k, candidate in enumerate(candidates):
            term = torch.exp((end * candidate).sum() / temperature)
            below = below + term if allowed[q, k] else below
            above = above + term if k in right[q] else above
        total = total - torch.log(above / below)
    return total


def outputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of 5 ends and 9 candidates, at most 3 of them right."""
    torch.manual_seed(0)
    allowed = torch.rand(5, 9) < 0.7
    right = torch.tensor([[4, 0, -1], [3, -1, -1], [8, 1, 2], [5, 6, -1], [7, -1, -1]])
    allowed[torch.arange(5)[:, None], right.where(right >= 0, right[:, :1])] = True
    ends, candidates = (torch.randn(size, 6, dtype=torch.float64, requires_grad=True) for size in (5, 9))
    return ends, candidates, allowed, right


def test_value_and_gradients_are_those_of_the_formula() -> None:
    ends, candidates, allowed, right = outputs()
    sums, expected = (rule(ends, candidates, allowed, right, 1.7) for rule in (phrase_sums, by_hand))
    torch.testing.assert_close(sums["loss"], expected)
    for each in (ends, candidates):
        gradients = (torch.autograd.grad(loss, each, retain_graph=True) for loss in (sums["loss"], expected))
        torch.testing.assert_close(*gradients)
    best = (ends @ candidates.T).masked_fill(~allowed, -torch.inf).argmax(1, keepdim=True)
    assert (int(sums["ends"]), int(sums["found"])) == (5, int((best == right).sum()))


def test_scores_are_added_up_in_float32() -> None:
    ends, candidates, allowed, right = outputs()
    half = phrase_sums(ends.bfloat16(), candidates.bfloat16(), allowed, right, 1.7)
    assert half["loss"].dtype == torch.float32
    torch.testing.assert_close(half["loss"].double(), by_hand(ends, candidates, allowed, right, 1.7), rtol=0.02, atol=0)


def test_without_ends_the_loss_is_0_and_connected() -> None:
    ends, candidates, allowed, right = outputs()
    for count in (9, 0):
        sums = phrase_sums(ends[:0], candidates[:count], allowed[:0, :count], right[:0, :1], 1.0)
        sums["loss"].backward()
        assert [value.item() for value in sums.values()] == [0, 0, 0]
