"""Draws from the softmax over candidates: its distribution, on any number of ranks, and whose distribution it is over
many groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.auxiliaries import ReplacedTokensConfig
from megahead.config.objective import ObjectiveConfig
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.scores import Dot, Harmonic, Score
from megahead.losses.softmax import CandidateShard, Softmax
from support.on_ranks import on_ranks

U, D = 7, 5


def problem(outputs: int) -> tuple[Tensor, Tensor, Candidates]:
    generator = torch.Generator().manual_seed(0)
    rows_UD = torch.randn(U, D, generator=generator, dtype=torch.float64)
    outputs_ND = torch.randn(1, D, generator=generator, dtype=torch.float64).expand(outputs, D)
    bias_U = torch.tensor([0.5, -1.0, 0.0, -torch.inf, 0.3, 2.0, -torch.inf], dtype=torch.float64)
    return outputs_ND, rows_UD, Candidates(torch.arange(U) * 10, bias_U, torch.full((outputs,), 2))


@pytest.mark.parametrize("score", [Dot(0.7), Harmonic(0.2)], ids=["dot", "harmonic"])
@pytest.mark.parametrize("own_bias", [False, True])
def test_candidates_are_drawn_as_often_as_the_softmax_says(score: Score, own_bias: bool) -> None:
    n = 20_000
    outputs_ND, rows_UD, candidates = problem(n)
    biases_U = candidates.bias_U
    assert biases_U is not None
    if own_bias:
        candidates = replace(candidates, sampling_bias_U=torch.full((U,), 1.5, dtype=torch.float64))
        biases_U = biases_U.index_fill(0, torch.tensor([2]), 1.5)
    expected_U = (score.reference_scores(outputs_ND[:1], rows_UD)[0] + biases_U).softmax(0)
    uniform_N = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # no noise
    index_N = Softmax(outputs_ND, rows_UD, candidates, score).sample(uniform_N)
    assert torch.bincount(index_N, minlength=U) / n == pytest.approx(expected_U.numpy(), abs=1e-4)
    assert not torch.isin(index_N, torch.tensor([3, 6])).any()
    assert (index_N.diff() >= 0).all()  # in the order of the candidates: a random number decides alone


@pytest.mark.parametrize("total", [511, 512, 513, 1300])
def test_of_many_candidates_that_one_is_drawn_at_which_the_running_sum_passes(total: int) -> None:
    """Against the sum over all, of single precision, too; the last ones have no weight."""
    generator = torch.Generator().manual_seed(0)
    rows_UD, outputs_ND = torch.randn(total, D, generator=generator), torch.randn(500, D, generator=generator)
    bias_U = torch.randn(total, generator=generator).index_fill(0, torch.arange(total - 5, total), -torch.inf)
    uniform_N = torch.rand(500, generator=generator, dtype=torch.float64)
    candidates = Candidates(torch.arange(total), bias_U, torch.zeros(500, dtype=torch.int64))
    index_N = Softmax(outputs_ND, rows_UD, candidates, Dot()).sample(uniform_N)
    below_NU = (outputs_ND.double() @ rows_UD.double().T + bias_U).softmax(1).cumsum(1)
    assert (below_NU[torch.arange(500), index_N] > uniform_N - 1e-6).all()
    assert (torch.nn.functional.pad(below_NU, (1, 0))[torch.arange(500), index_N] < uniform_N + 1e-6).all()
    assert (index_N < total - 5).all()


def share(group: Group, total: int) -> Tensor:
    torch.manual_seed(1)
    outputs_ND, rows_UD = torch.randn(600, D, dtype=torch.float64), torch.randn(total, D, dtype=torch.float64)
    bias_U, uniform_N = torch.randn(total, dtype=torch.float64), torch.rand(600, dtype=torch.float64)
    candidates = Candidates(torch.arange(total), bias_U, torch.randint(total, (600,)))
    shard = CandidateShard.of(total, -(-total // group.size), group)
    own_wD = rows_UD[shard.first :][: shard.width]
    own_wD = torch.cat([own_wD, torch.full((shard.width - len(own_wD), D), 9.0, dtype=torch.float64)])
    return Softmax(outputs_ND, own_wD, candidates, Dot(), shard).sample(uniform_N)


@pytest.mark.parametrize("total", [3, 8, 201, 2050])
def test_draws_are_the_same_however_many_ranks_share_the_candidates(total: int) -> None:
    (alone,) = on_ranks(1, share, total)
    assert alone.min() >= 0
    assert alone.max() < total
    for size in (2, 4):
        for each in on_ranks(size, share, total):
            assert torch.equal(each, alone)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("total", [3, 2050])
def test_deterministic_algorithms_draw_the_same(total: int, request: pytest.FixtureRequest) -> None:
    """Where sums are products: a GPU has no other deterministic ones."""
    drawn = share(Group(), total)
    request.getfixturevalue("deterministic")
    assert torch.equal(share(Group(), total), drawn)


def test_nothing_is_drawn_where_there_are_no_outputs() -> None:
    outputs_ND, rows_UD, candidates = problem(0)
    assert Softmax(outputs_ND, rows_UD, candidates, Dot()).sample(torch.zeros(0)).shape == (0,)


def test_the_target_is_drawn_where_there_is_nothing_else() -> None:
    rule = build_objective(ObjectiveConfig(replaced_tokens=ReplacedTokensConfig()), 50)
    ids = torch.tensor([17])
    candidates = rule.candidate_set(ids).candidates(ids).pad_to_multiple(8)
    rows_UD, uniform_N = torch.randn(8, D), torch.tensor([0.9], dtype=torch.float64)
    assert Softmax(torch.randn(1, D), rows_UD, candidates, Dot()).sample(uniform_N).tolist() == [0]


def test_an_outputs_own_target_weighs_as_often_as_others_have_it_on_average() -> None:
    """By the text's counts, whether they do or not; where a text has none, as often as they do."""
    config, ids = ObjectiveConfig(replaced_tokens=ReplacedTokensConfig()), torch.tensor([5, 7, 7, 7, 9])
    counts_V = torch.zeros(50, dtype=torch.int64).index_fill(0, torch.tensor([5, 7]), 10**9)
    candidates = build_objective(config, 50, counts_V).candidate_set(ids).candidates(ids)
    assert candidates.sampling_bias_U is not None
    assert candidates.sampling_bias_U.exp().tolist() == pytest.approx([2, 2, 0], abs=1e-6)
    rule = build_objective(config, 50)
    candidates = rule.candidate_set(ids).candidates(ids)
    assert candidates.sampling_bias_U is not None
    assert candidates.sampling_bias_U.exp().tolist() == pytest.approx([0, 2, 0])
    assert build_objective(ObjectiveConfig(), 50).candidate_set(ids).candidates(ids).sampling_bias_U is None


WEIGHTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "once": {"bias": "once"},
    "corrected": {"bias": "corrected"},
    "negatives": {"negatives": 40, "negatives_from": "uniform"},
    "few": {"max_candidates": 9},
}


def mean_weight(name: str, q_V: np.ndarray, targets: int) -> np.ndarray:
    """What each id weighs in a group on average, up to a constant, by definition."""
    once_V = 1 - (1 - q_V) ** targets
    others = {"once": once_V, "corrected": np.ones_like(q_V), "negatives": targets * q_V + 40 / len(q_V)}
    return others.get(name, q_V)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_over_many_groups_tokens_are_drawn_as_by_the_training_free_head(name: str) -> None:
    """At the optimum of each objective, where scores are log p(v | context) less the bias of that head. The original is
    drawn no more often than p says, though it is always a candidate."""
    config = ObjectiveConfig(replaced_tokens=ReplacedTokensConfig(), **WEIGHTINGS[name])
    vocabulary, targets, groups, each = 16, 40, 500, 32
    random = np.random.default_rng(0)
    q_V, p_V = random.dirichlet(np.full(vocabulary, 0.6)) + 0.004, random.dirichlet(np.full(vocabulary, 2.0))
    q_V /= q_V.sum()
    optimum_V = torch.tensor(np.log(p_V / mean_weight(name, q_V, targets)))
    rule = build_objective(config, vocabulary, torch.tensor(q_V * 1e7).long())
    found_V, originals = np.zeros(vocabulary), 0
    for group in range(groups):
        own = random.choice(vocabulary, 1, p=p_V)
        ids = torch.from_numpy(np.concatenate([own, random.choice(vocabulary, targets - 1, p=q_V)]))
        candidates = rule.candidate_set(ids, seed=group).candidates(ids[:1])
        assert candidates.ids_U is not None
        again = replace(candidates, target_N=candidates.target_N.expand(each))
        rows_UD, outputs_ND = optimum_V[candidates.ids_U][:, None], torch.ones(each, 1, dtype=torch.float64)
        # stratified: what noise there is comes from the groups
        uniform_N = torch.from_numpy((np.arange(each) + random.random(each)) / each)
        drawn_N = candidates.ids_U[Softmax(outputs_ND, rows_UD, again, Dot()).sample(uniform_N)].numpy()
        found_V += np.bincount(drawn_N, minlength=vocabulary)
        originals += int((drawn_N == own).sum())
    apart = np.abs(found_V / found_V.sum() - p_V).sum() / 2
    assert apart < 0.045  # measured over eight seeds: 0.005 to 0.021, with few candidates to 0.036
    assert np.abs(p_V - q_V).sum() / 2 > 0.3, "text's frequencies are not near"
    assert originals / groups / each == pytest.approx(np.square(p_V).sum(), abs=0.015)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_rare_original_is_drawn_as_often_as_its_probability_says(name: str) -> None:
    """An id of rank 500 with p = 0.9, which next to none of the group's other targets is."""
    config, vocabulary, targets, each = (
        ObjectiveConfig(replaced_tokens=ReplacedTokensConfig(), **WEIGHTINGS[name]),
        5000,
        300,
        64,
    )
    random, own = np.random.default_rng(0), 500
    q_V = 1 / np.arange(1, vocabulary + 1)
    q_V /= q_V.sum()
    p_V = 0.1 * q_V
    p_V[own] += 0.9
    optimum_V = torch.tensor(np.log(p_V / mean_weight(name, q_V, targets)))
    rule = build_objective(config, vocabulary, torch.tensor(q_V * 1e9).long())
    uniform_N, originals = (torch.arange(each, dtype=torch.float64) + 0.5) / each, 0
    for group in range(100):
        ids = torch.from_numpy(np.append(random.choice(vocabulary, targets - 1, p=q_V), own))
        candidates = rule.candidate_set(ids, seed=group).candidates(ids[-1:])
        assert candidates.ids_U is not None
        again = replace(candidates, target_N=candidates.target_N.expand(each))
        outputs_ND, rows_UD = torch.ones(each, 1, dtype=torch.float64), optimum_V[candidates.ids_U][:, None]
        drawn_N = candidates.ids_U[Softmax(outputs_ND, rows_UD, again, Dot()).sample(uniform_N)]
        originals += int((drawn_N == own).sum())
    assert originals / each / 100 == pytest.approx(p_V[own], abs=0.02)
