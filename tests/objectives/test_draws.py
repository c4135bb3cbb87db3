"""Draws from the softmax over candidates: its distribution, on any number of ranks, and whose distribution it is over
many groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config import ObjectiveConfig
from megahead.distributed import Group
from megahead.objectives import Candidates, CandidateShard, Dot, Harmonic, Score, build_objective
from megahead.objectives.candidate_softmax import grouped_draws
from megahead.parallel.candidate_softmax import parallel_draws
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
def test_candidates_are_drawn_as_often_as_the_softmax_of_the_loss_says(score: Score, own_bias: bool) -> None:
    n = 20_000
    outputs_ND, rows_UD, candidates = problem(n)
    biases_U = candidates.bias_U
    assert biases_U is not None
    if own_bias:
        candidates = replace(candidates, positive_bias_U=torch.full((U,), 1.5, dtype=torch.float64))
        biases_U = biases_U.index_fill(0, torch.tensor([2]), 1.5)
    expected_U = (score.written_out(outputs_ND[:1], rows_UD)[0] + biases_U).softmax(0)
    uniform_N = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # no noise
    place_N = grouped_draws(outputs_ND, rows_UD, candidates, score, uniform_N, Group())
    assert torch.bincount(place_N, minlength=U) / n == pytest.approx(expected_U.numpy(), abs=1e-4)
    assert not torch.isin(place_N, torch.tensor([3, 6])).any()
    assert (place_N.diff() >= 0).all()  # in the order of the candidates: a random number decides alone


def share(group: Group, total: int) -> Tensor:
    torch.manual_seed(1)
    outputs_ND, rows_UD = torch.randn(600, D, dtype=torch.float64), torch.randn(total, D, dtype=torch.float64)
    bias_U, uniform_N = torch.randn(total, dtype=torch.float64), torch.rand(600, dtype=torch.float64)
    candidates = Candidates(torch.arange(total), bias_U, torch.randint(total, (600,)))
    shard = CandidateShard.of(total, -(-total // group.size), group)
    own_wD = rows_UD[shard.first :][: shard.width]
    own_wD = torch.cat([own_wD, torch.full((shard.width - len(own_wD), D), 9.0, dtype=torch.float64)])
    return parallel_draws(outputs_ND, own_wD, candidates, Dot(), uniform_N, shard)


@pytest.mark.parametrize("total", [3, 8, 201])
def test_draws_are_the_same_however_many_ranks_share_the_candidates(total: int) -> None:
    (alone,) = on_ranks(1, share, total)
    assert alone.min() >= 0
    assert alone.max() < total
    for size in (2, 4):
        for each in on_ranks(size, share, total):
            assert torch.equal(each, alone)


def test_nothing_is_drawn_where_there_are_no_outputs() -> None:
    outputs_ND, rows_UD, candidates = problem(0)
    assert grouped_draws(outputs_ND, rows_UD, candidates, Dot(), torch.zeros(0), Group()).shape == (0,)


WEIGHTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "once": {"bias": "once"},
    "corrected": {"bias": "corrected"},
    "negatives": {"negatives": 40, "negatives_from": "uniform"},
    "few": {"max_candidates": 9},
}


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_over_many_groups_tokens_are_drawn_as_by_the_training_free_head(name: str) -> None:
    """At the optimum of each objective, where scores are log p(v | context) less the bias of that head."""
    config, vocabulary, targets, groups = ObjectiveConfig(**WEIGHTINGS[name]), 16, 60, 3000
    random = np.random.default_rng(0)
    q_V, p_V = random.dirichlet(np.full(vocabulary, 0.6)) + 0.004, random.dirichlet(np.full(vocabulary, 2.0))
    q_V /= q_V.sum()
    weight_V = {
        "paper": q_V,
        "once": 1 - (1 - q_V) ** targets,
        "corrected": np.ones(vocabulary),
        "negatives": targets * q_V + 40 / vocabulary,
        "few": q_V,
    }[name]
    optimum_V = torch.tensor(np.log(p_V / weight_V))
    rule = build_objective(config, vocabulary, torch.tensor(q_V * 1e7).long())
    found_V = np.zeros(vocabulary)
    for group in range(groups):
        ids = torch.from_numpy(random.choice(vocabulary, targets, p=q_V))
        candidates = rule.pool(ids, seed=group).candidates(ids[:1])
        assert candidates.ids_U is not None
        outputs_ND = torch.ones(20, 1, dtype=torch.float64)
        among = replace(candidates, positive_N=torch.full((20,), -1))  # of another context: no output's own target
        rows_UD, uniform_N = optimum_V[candidates.ids_U][:, None], torch.from_numpy(random.random(20))
        drawn_N = candidates.ids_U[grouped_draws(outputs_ND, rows_UD, among, Dot(), uniform_N, Group())]
        found_V += np.bincount(drawn_N, minlength=vocabulary)
    apart = np.abs(found_V / found_V.sum() - p_V).sum() / 2
    assert apart < 0.04  # measured: 0.006 to 0.03
    assert np.abs(p_V - q_V).sum() / 2 > 0.3, "text's frequencies are not near"
