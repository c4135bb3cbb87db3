"""The bag of words: its loss and gradients by the definition, for every bias, score and split of the candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.objective import ObjectiveConfig
from megahead.distributed.group import Group
from megahead.losses import bag_of_words
from megahead.losses.bag_of_words import Texts, bag_loss, bag_loss_reference
from megahead.losses.candidates import Candidates, all_rows_as_candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.scores import SCORES
from megahead.losses.softmax import CandidateShard, Softmax
from support.on_ranks import on_ranks

TEXTS, LENGTH, VOCABULARY, D = 5, 9, 40, 6
COUNTS = torch.arange(1, VOCABULARY + 1)
RULES: list[dict[str, Any]] = [
    {"bias": "paper", "score": "harmonic", "temperature": 0.5},
    {"bias": "once", "score": "cosine", "temperature": 0.3},
    {"bias": "corrected", "negatives": 7},
    {"bias": "own_once"},
    {"bias": "paper", "max_candidates": 8},
    {"name": "vanilla"},
]


def texts_of(seed: int = 0) -> tuple[Texts, Tensor]:
    """Texts of 0 to LENGTH tokens at any places, some of which occur twice; the tokens' ids."""
    random = np.random.default_rng(seed)
    is_token = random.random((TEXTS, LENGTH)) < 0.7
    is_token[2] = False
    index = torch.from_numpy(np.flatnonzero(is_token))
    return Texts(index, TEXTS, LENGTH), torch.from_numpy(random.integers(0, 12, len(index)))


def inputs_of(rule: dict[str, Any]) -> tuple[Tensor, Tensor, Candidates, Texts, Any]:
    texts, ids = texts_of()
    if rule.get("name") == "vanilla":
        bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64, requires_grad=True)
        candidates = Candidates(None, bias, ids, target_logit_has_bias=True)
    else:
        candidates = build_objective(ObjectiveConfig(**rule), VOCABULARY, COUNTS).candidate_set(ids, 3).candidates(ids)
        candidates = candidates.pad_to_multiple(4)
    generator = torch.Generator().manual_seed(1)
    width = VOCABULARY if candidates.ids_U is None else len(candidates.ids_U)
    outputs, rows = (
        torch.randn(n, D, dtype=torch.float64, generator=generator, requires_grad=True) for n in (len(ids), width)
    )
    score = SCORES[rule.get("score", "dot")](rule.get("temperature", 1.0))
    return outputs, rows, candidates, texts, score


@pytest.mark.parametrize("numbers", [1, 8, 9, 60, 90, 500, 10_000])
def test_blocks_are_as_large_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(bag_of_words, "_SCORE_BYTES_ON_CPU", 4 * numbers)
    texts, rows = bag_of_words._block_shape(torch.zeros(TEXTS, LENGTH, D), VOCABULARY)
    size = texts * min(rows, VOCABULARY) * LENGTH
    assert size <= max(numbers, LENGTH)
    if rows >= VOCABULARY:  # all rows: one more text would be too many
        assert texts == TEXTS or size + VOCABULARY * LENGTH > numbers
    else:
        assert texts == 1
        assert size + LENGTH > numbers


def with_gradients(loss: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    learned = [x for x in inputs if x is not None and x.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, learned)]


@pytest.mark.parametrize("block", [LENGTH * 3, LENGTH * VOCABULARY * 2], ids=["3 rows", "2 texts or more"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_is_the_definition(rule: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bag_of_words, "_SCORE_BYTES_ON_CPU", 8 * block)
    outputs, rows, candidates, texts, score = inputs_of(rule)
    expected = with_gradients(
        bag_loss_reference(outputs, rows, candidates, texts, score), outputs, rows, candidates.bias_U
    )
    loss = bag_loss(Softmax(outputs, rows, candidates, score), texts)
    for mine, theirs in zip(with_gradients(loss, outputs, rows, candidates.bias_U), expected, strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def on_shard(group: Group, rule: dict[str, Any]) -> list[Tensor]:
    outputs, rows, candidates, texts, score = inputs_of(rule)
    shard = CandidateShard.of(len(rows), -(-len(rows) // group.size), group)
    local = torch.cat([rows.detach(), rows.new_zeros(shard.width, D)])[shard.first : shard.first + shard.width]
    local.requires_grad_()
    loss = bag_loss(Softmax(outputs, local, candidates, score, shard), texts)
    loss, of_outputs, of_rows, *of_bias = with_gradients(loss, outputs, local, candidates.bias_U)
    return [loss, of_outputs, torch.cat(group.all_gather(of_rows).unbind())[: len(rows)], *of_bias]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_candidates_of_three_ranks_are_those_of_one(rule: dict[str, Any]) -> None:
    outputs, rows, candidates, texts, score = inputs_of(rule)
    loss = bag_loss(Softmax(outputs, rows, candidates, score), texts)
    expected = with_gradients(loss, outputs, rows, candidates.bias_U)
    for found in on_ranks(3, on_shard, rule):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_a_text_of_one_token_has_the_softmax_of_its_output() -> None:
    outputs, rows = torch.randn(3, D, requires_grad=True), torch.randn(VOCABULARY, D)
    ids = torch.tensor([7, 0, 39])
    softmax = Softmax(outputs, rows, all_rows_as_candidates(ids))
    texts = Texts(torch.tensor([4, 9, 20]), 3, LENGTH)
    for mine, theirs in zip(
        with_gradients(bag_loss(softmax, texts), outputs), with_gradients(softmax.loss(), outputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_half_precision_rounds_scores_alone() -> None:
    outputs, rows, candidates, texts, score = inputs_of({"name": "vanilla"})
    exact = with_gradients(bag_loss_reference(outputs, rows, candidates, texts, score), outputs, rows)
    halves = [x.detach().bfloat16().requires_grad_() for x in (outputs, rows)]
    loss = bag_loss(Softmax(*halves, candidates, score), texts)
    found = with_gradients(loss, *halves)
    assert [x.dtype for x in found[1:]] == [torch.bfloat16] * 2
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine.double() - theirs).norm() < 0.05 * theirs.norm()


def test_groups_have_texts_of_their_own() -> None:
    texts = Texts(torch.tensor([1, 3, 9, 10, 22, 35]), 4, LENGTH)
    first, second = texts.split([4, 2])
    assert (first.index_N.tolist(), second.index_N.tolist()) == ([1, 3, 9, 10], [4, 17])
    assert first[1:] == second[1:] == (2, LENGTH)


def test_no_tokens_have_a_loss_of_zero_connected_to_the_inputs() -> None:
    outputs, rows = torch.zeros(0, D, requires_grad=True), torch.zeros(4, D, requires_grad=True)
    softmax = Softmax(outputs, rows, all_rows_as_candidates(torch.zeros(0, dtype=torch.int64)))
    loss, *gradients = with_gradients(bag_loss(softmax, Texts(torch.zeros(0, dtype=torch.int64), 2, 3)), outputs, rows)
    assert loss == 0
    assert [g.shape for g in gradients] == [outputs.shape, rows.shape]
