"""Each variant of the objective against its formula, written out over the N targets (and M draws) in float64."""

from __future__ import annotations

from collections import Counter
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahead.config.objective import ChunkSize, ObjectiveConfig
from megahead.errors import ConfigError
from megahead.losses import fused_softmax
from megahead.losses.candidates import (
    Candidates,
    compute_biases,
    inclusion_probabilities,
    log_negative_probabilities,
    log_unigram,
    sample_ids,
    systematic_sample,
    training_free_bias,
    unique_candidates,
)
from megahead.losses.contrastive import HeadlessObjective, build_objective
from megahead.losses.scores import Dot
from megahead.losses.softmax import candidate_loss, candidate_loss_reference

V, N, D = 12, 30, 5
TOKEN_COUNTS = torch.arange(1, V + 1) ** 2


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V - 2, (N,), generator=generator).square() // (V - 2)
    return outputs, table, targets


def objective(**fields: Any) -> HeadlessObjective:
    built = build_objective(ObjectiveConfig(**fields), V, TOKEN_COUNTS)
    assert isinstance(built, HeadlessObjective)
    return built


def loss_of(candidates: Candidates, outputs: Tensor, table: Tensor, temperature: float = 1.0) -> Tensor:
    rows = table[candidates.ids_U]
    loss = candidate_loss(outputs, rows, candidates, Dot(temperature))
    expected = candidate_loss_reference(outputs, rows, candidates, Dot(temperature))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    return loss


def formula(bias: str, outputs: Tensor, table: Tensor, targets: list[int], negatives: list[int]) -> Tensor:
    """As a sum over every target and every draw, one output at a time."""
    counts, q = Counter(targets + negatives), log_unigram(TOKEN_COUNTS, V).double().exp()
    pi = 1 - (1 - q) ** (len(targets) + len(negatives))
    total = torch.zeros((), dtype=torch.float64)
    for h, own in zip(outputs, targets, strict=True):
        weights = {u: {"paper": c, "once": 1, "corrected": 1 / pi[u], "own_once": c}[bias] for u, c in counts.items()}
        if bias == "own_once":
            weights[own] = 1
        total = total + torch.log(sum(w * torch.exp(h @ table[u]) for u, w in weights.items())) - h @ table[own]
        if bias == "corrected":
            total = total + torch.log(pi[own])
    return total


@pytest.mark.parametrize("negatives", [0, 25])
@pytest.mark.parametrize("bias", ["paper", "once", "corrected", "own_once"])
def test_equals_its_formula_in_value_and_both_gradients(bias: str, negatives: int) -> None:
    outputs, table, targets = drawn()
    rule = objective(bias=bias, negatives=negatives)
    candidates = rule.candidate_set(targets, seed=3).candidates(targets)
    below = log_unigram(TOKEN_COUNTS, V).exp().double().cumsum(0)
    draws = sample_ids(below, negatives, torch.Generator().manual_seed(3))
    expected = formula(bias, outputs, table, targets.tolist(), draws.tolist())
    loss = loss_of(candidates, outputs, table)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    wanted = [outputs, table]
    for mine, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_the_papers_pool_is_its_unique_targets() -> None:
    _, _, targets = drawn()
    pooled, plain = objective().candidate_set(targets).candidates(targets), unique_candidates(targets)
    assert pooled.as_target_bias_U is None
    assert not pooled.target_logit_has_bias
    for mine, theirs in (
        (pooled.ids_U, plain.ids_U),
        (pooled.bias_U, plain.bias_U),
        (pooled.target_N, plain.target_N),
    ):
        torch.testing.assert_close(mine, theirs)


def test_own_biases_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, table, targets = drawn()
    candidates = objective(max_candidates=3).candidate_set(targets).candidates(targets)
    assert candidates.as_target_bias_U is not None
    losses, gradients = [], []
    for chunk_bytes in (1, 300, 10**9):
        monkeypatch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(chunk_bytes, min_outputs=1, multiple=1))
        losses.append(loss_of(candidates, outputs, table, 0.7))
        gradients.append(torch.autograd.grad(losses[-1], [table])[0])
    torch.testing.assert_close(losses, [losses[0]] * 3)
    torch.testing.assert_close(gradients, [gradients[0]] * 3)


def test_capped_candidates_are_few_always_hold_the_own_token_and_are_right_on_average() -> None:
    outputs, table, targets = drawn()
    rule, draws, most = objective(max_candidates=4), 2000, 4
    exact = (torch.exp(outputs @ table.T) * torch.bincount(targets, minlength=V)).sum(1).detach()
    sums = torch.empty(draws, N, dtype=torch.float64)
    for seed in range(draws):
        group = rule.candidate_set(targets, seed).candidates(targets)
        assert group.ids_U is not None
        assert group.bias_U is not None
        assert int((group.bias_U > -torch.inf).sum()) == most
        assert torch.equal(group.ids_U[group.target_N], targets)
        target_bias = group.bias_U if group.as_target_bias_U is None else group.as_target_bias_U
        scores = (outputs @ table[group.ids_U].T).detach()
        own = group.target_N[:, None]
        sums[seed] = (scores + group.bias_U).scatter(1, own, scores.gather(1, own) + target_bias[own]).exp().sum(1)
    error = (sums.mean(0) - exact).abs() / (sums.std(0) / draws**0.5)
    assert sums.std(0).min() > 0
    assert error.max() < 4.5  # standard errors, the largest of 30


def test_a_cap_holds_where_every_id_is_a_target() -> None:
    candidates = objective(max_candidates=4).candidate_set(torch.arange(V)).candidates(torch.arange(V))
    assert candidates.bias_U is not None
    assert int((candidates.bias_U > -torch.inf).sum()) == 4


def test_a_cap_that_is_not_reached_changes_nothing() -> None:
    _, _, targets = drawn()
    capped, plain = (objective(max_candidates=most).candidate_set(targets).candidates(targets) for most in (V, None))
    torch.testing.assert_close(capped.bias_U, plain.bias_U)
    assert capped.as_target_bias_U is None


def test_samples_have_their_size_and_each_member_its_chance() -> None:
    weights = torch.tensor([0.0, 9.0, 1.0, 2.0, 40.0, 3.0, 0.5])
    chances = inclusion_probabilities(weights, 3)
    assert chances.sum() == pytest.approx(3)
    assert chances[0] == 0
    assert chances[4] == 1
    generator = torch.Generator().manual_seed(0)
    samples = torch.stack([systematic_sample(chances, generator) for _ in range(5000)])
    assert samples.sum(1).unique().tolist() == [3]
    torch.testing.assert_close(samples.double().mean(0), chances, atol=0.03, rtol=0)


def test_all_that_weigh_anything_are_in_where_no_fewer_are_asked_for() -> None:
    weights = torch.tensor([0.0, 4.0, 1.0])
    for size in (2, 3):
        assert inclusion_probabilities(weights, size).tolist() == [0, 1, 1]


def test_draws_belong_to_their_seed_and_follow_their_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    ids = sample_ids(probabilities.double().cumsum(0), 20_000, torch.Generator().manual_seed(1))
    counts = torch.bincount(ids, minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / 20_000, probabilities, atol=0.02, rtol=0)
    _, _, targets = drawn()
    rule = objective(negatives=9, negatives_from="uniform", max_candidates=5)
    again, same, other = (rule.candidate_set(targets, seed).shared_bias_P for seed in (1, 1, 2))
    assert torch.equal(again, same)
    assert not torch.equal(again, other)


def test_negatives_are_drawn_as_asked_for() -> None:
    counts = 10**8 * torch.tensor([6, 3, 1])
    unigram = log_negative_probabilities(ObjectiveConfig(negatives=5), 3, counts).exp()
    torch.testing.assert_close(unigram, torch.tensor([0.6, 0.3, 0.1]))
    for known in (counts, None):
        even = log_negative_probabilities(ObjectiveConfig(negatives=5, negatives_from="uniform"), 3, known).exp()
        torch.testing.assert_close(even, torch.full((3,), 1 / 3))


@pytest.mark.parametrize("preferred", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": "once"},
        {"bias": "corrected"},
        {"negatives": 300},
        {"negatives": 200, "negatives_from": "uniform"},
        {"bias": "once", "negatives": 6},
        {"bias": "corrected", "negatives": 4},
    ],
    ids=str,
)
def test_the_training_free_head_recovers_what_training_aims_at(fields: dict[str, Any], preferred: bool) -> None:
    """Free scores per (context, token), trained to their optimum on many groups, plus the head's bias: log p.

    Also where some tokens were `preferred` as targets: then p of the text, which prefers none."""
    generator = torch.Generator().manual_seed(0)
    text = torch.rand(2, 4, generator=generator) ** 2 + 0.03
    joint = text * (torch.tensor([1.0, 2.0, 4.0, 0.5]) if preferred else 1.0)
    text, joint = text / text.sum(), joint / joint.sum()
    config, size, groups = ObjectiveConfig(**fields), 200 if "bias" not in fields else 12, 1500
    q_counts = (joint.sum(0) * 1e9).long()
    rule = build_objective(config, 4, q_counts)
    pairs = torch.multinomial(joint.flatten(), groups * size, replacement=True, generator=generator).view(groups, size)
    biases, own = torch.full((groups, 4), -torch.inf), pairs % 4
    for place in range(groups):
        group = rule.candidate_set(own[place], place).candidates(own[place])
        assert group.bias_U is not None
        biases[place, group.ids_U] = group.bias_U.float()
    counts = torch.zeros(groups, 8).scatter_add(1, pairs, torch.ones(groups, size)).view(groups, 2, 4)
    scores = torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        log_p = (scores + biases[:, None]).log_softmax(2)
        loss = -(counts * log_p.masked_fill(counts == 0, 0)).sum() / counts.sum()  # of equal pairs in one
        loss.backward()
        return loss

    optimizer.step(closure)
    asked = (text.sum(0) * 1e9).long() if preferred else None
    head = training_free_bias(config, 4, q_counts, q_counts, size, asked)
    assert (head is None) == (config.head() == "tied")
    learned = (scores.detach() + (0.0 if head is None else head)).softmax(dim=1)
    truth = joint if head is None else text  # without a bias it speaks of targets as they are drawn
    truth = truth / truth.sum(1, keepdim=True)
    divergence = (truth * (truth / learned).log()).sum(1).max()
    assert divergence < 5e-4  # nats
    if head is not None:
        without = scores.detach().softmax(dim=1)
        assert (truth * (truth / without).log()).sum(1).max() > 5 * divergence


def test_token_counts_are_asked_for_where_they_are_needed() -> None:
    for fields, asked in (
        ({"bias": "corrected"}, "`objective.bias` must .* token counts .* is corrected instead; preprocess"),
        ({"negatives": 5}, "`objective.negatives_from` must .* token counts .* is unigram instead; preprocess"),
    ):
        with pytest.raises(ConfigError, match=asked):
            build_objective(ObjectiveConfig(**fields), V, torch.zeros(V, dtype=torch.int64))  # type: ignore[arg-type]
    build_objective(ObjectiveConfig(negatives=5, negatives_from="uniform"), V)


def test_the_corrected_bias_needs_the_chances_that_it_corrects() -> None:
    with pytest.raises(ValueError, match="needs the probabilities"):
        compute_biases("corrected", torch.ones(3), None)


def test_the_head_of_candidates_that_count_once_is_how_often_they_are_candidates() -> None:
    head = training_free_bias(
        ObjectiveConfig(bias="once"), 3, 10**8 * torch.tensor([6, 3, 1]), None, mean_group_targets=7
    )
    assert head is not None
    assert head.tolist() == pytest.approx([log(1 - (1 - p) ** 7) for p in (0.6, 0.3, 0.1)], abs=1e-5)


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0)
        return result


@pytest.mark.parametrize("fields", [{}, {"bias": "corrected", "negatives": 50}, {"max_candidates": 40}])
def test_choosing_candidates_does_not_cost_a_vocabulary(fields: dict[str, Any]) -> None:
    vocabulary = 100_000
    rule = build_objective(ObjectiveConfig(**fields), vocabulary, torch.ones(vocabulary, dtype=torch.int64))
    targets = torch.randint(vocabulary, (300,))
    with LargestTensor() as largest:
        candidates = rule.candidate_set(targets, seed=1).candidates(targets)
    assert largest.numbers < 2000
    assert candidates.ids_U is not None
    assert torch.equal(candidates.ids_U[candidates.target_N], targets)
