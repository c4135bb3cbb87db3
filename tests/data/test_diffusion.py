"""Masked diffusion: which shares of rows are masked, what they count, and the bound that their losses add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from megahead.config.masking import MaskingConfig
from megahead.data.batch import Batch, EncoderRowBuilder
from megahead.data.masking import DiffusionCollator
from megahead.data.samples import CounterRng
from megahead.data.strategy import WeightedIds

CLS, SEP, MASK, END, PAD, VOCABULARY = 1, 2, 3, 4, 0, 1000


def diffusion(seed: int = 7, isolate: bool = True) -> DiffusionCollator:
    masking = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, special_tokens=[PAD], diffusion=True)
    return DiffusionCollator(EncoderRowBuilder(masking, END, isolate), seed)


def texts(rows: int, length: int = 30, ends: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(0)
    text = generator.integers(5, VOCABULARY, (rows, length))
    text[generator.random(text.shape) < ends] = END
    return text


def per_row(batch: Batch, values: np.ndarray | None = None) -> np.ndarray:
    """Number of targets of each row, or the sum of their `values`."""
    rows, length = batch.input_ids_BT.shape
    return np.bincount(batch.target_index_N.numpy() // length, values, rows)


def test_every_number_of_masks_from_one_to_all_is_as_frequent_as_any_other() -> None:
    counts = per_row(diffusion().batch(texts(3000), range(3000)))
    assert np.bincount(counts, minlength=31)[1:] == pytest.approx(100, abs=3)  # spread evenly, hence hardly any noise
    assert counts.min() == 1
    assert counts.max() == 30


@pytest.mark.parametrize("first", [0, 12_345, 2**40])
def test_the_shares_of_any_consecutive_samples_lie_evenly(first: int) -> None:
    counts = per_row(diffusion().batch(texts(32), range(first, first + 32)))
    assert counts.mean() == pytest.approx(15.5, abs=0.8)  # independent draws: a standard deviation of 1.5
    assert len(set(np.ceil(counts / 4))) == 8


def test_each_target_counts_by_the_inverse_of_its_rows_share_and_a_row_by_its_tokens() -> None:
    text = texts(300, ends=0.2)
    text[::7, 12:] = -1
    batch = diffusion().batch(text, range(300))
    assert batch.weight_N is not None
    tokens, masked = ((text >= 0) & (text != END)).sum(1), per_row(batch)
    assert batch.weight_N.numpy() == pytest.approx(np.repeat(tokens / np.maximum(masked, 1), masked))
    assert per_row(batch, batch.weight_N.numpy()) == pytest.approx(tokens, rel=1e-6)
    assert batch.total_weight() == pytest.approx(tokens.sum(), rel=1e-6)


def test_all_targets_are_read_as_masks_all_else_as_it_is_and_special_tokens_are_no_targets() -> None:
    text = texts(400, ends=0.2)
    text[:, 20:] = -1
    text[::3, 5] = PAD
    batch = diffusion().batch(text, range(400))
    read, plain = batch.input_ids_BT.numpy(), diffusion().row_builder.build(text)
    chosen = np.zeros(read.size, bool)
    chosen[batch.target_index_N.numpy()] = True
    assert (read.reshape(-1)[chosen] == MASK).all()
    assert (read.reshape(-1)[~chosen] == plain.tokens_BT.reshape(-1)[~chosen]).all()
    assert (batch.target_ids_N.numpy() == plain.tokens_BT.reshape(-1)[chosen]).all()
    assert not np.isin(batch.target_ids_N, [CLS, SEP, MASK, END, PAD]).any()
    assert batch.max_targets_per_row == per_row(batch).max()


def test_all_places_are_masked_alike() -> None:
    batch = diffusion().batch(np.full((6000, 10), 7), range(6000))
    counts = np.bincount(batch.target_index_N.numpy() % 12, minlength=12)
    assert counts[0] == counts[11] == 0
    assert counts[1:11] == pytest.approx(3300, abs=200)  # five standard deviations


def test_by_weights_rare_ids_are_masked_before_others_and_no_row_more_or_less() -> None:
    weights = np.ones(VOCABULARY)
    weights[8] = 3.0
    text = np.tile(np.array([7, 8]), (6000, 1))
    batch = replace(diffusion(), strategy=WeightedIds(weights)).batch(text, range(6000))
    assert (per_row(batch) == per_row(diffusion().batch(text, range(6000)))).all()
    alone = per_row(batch)[batch.target_index_N.numpy() // 4] == 1
    assert (batch.target_ids_N.numpy()[alone] == 8).mean() == pytest.approx(3 / 4, abs=0.035)  # 3000 rows
    assert batch.total_weight() == pytest.approx(text.size)


def test_a_row_without_text_has_no_targets_and_no_weight() -> None:
    batch = diffusion().batch(np.array([[-1, -1], [END, END]]), [0, 1])
    assert batch.target_ids_N.numel() == batch.total_weight() == 0


def test_a_sample_is_masked_alike_alone_and_in_any_batch_and_otherwise_by_another_seed_or_number() -> None:
    text = np.tile(texts(1), (8, 1))
    together = diffusion().batch(text, range(100, 108)).input_ids_BT
    for place in range(8):
        assert (diffusion().batch(text[:1], [100 + place]).input_ids_BT[0] == together[place]).all()
    assert len({tuple(row.tolist()) for row in together}) == 8
    assert not (diffusion(seed=8).batch(text, range(100, 108)).input_ids_BT == together).all()


def test_weyls_sequence_is_uniform_over_seeds() -> None:
    firsts = np.array([CounterRng(seed, [5]).low_discrepancy(41)[0] for seed in range(2000)])
    assert np.histogram(firsts, 10, (0, 1))[0] == pytest.approx(200, abs=65)


PLACES, IDS = 3, 4
Chances = Mapping[tuple[int | None, ...], np.ndarray]
"""Of a row's tokens (None: masked), the probabilities of each place's token, [PLACES, IDS]."""


def conditionals(joint: np.ndarray) -> Chances:
    """Exactly those of a distribution, [IDS] * PLACES."""
    found = {}
    for seen in product([None, *range(IDS)], repeat=PLACES):
        given = np.zeros_like(joint)
        index = tuple(slice(None) if token is None else token for token in seen)
        given[index] = joint[index]
        axes = [tuple(k for k in range(PLACES) if k != place) for place in range(PLACES)]
        found[seen] = np.stack([given.sum(axis) for axis in axes]) / given.sum()
    return found


def of_anything() -> Chances:
    """Of a model whose predictions agree with no distribution."""
    generator = np.random.default_rng(1)
    return {seen: generator.dirichlet(np.ones(IDS), PLACES) for seen in product([None, *range(IDS)], repeat=PLACES)}


def mean_loss(chances: Chances, text: tuple[int, ...], samples: int = 12_000) -> float:
    """Weighed losses of the masked tokens of a row, averaged over samples."""
    batch = diffusion().batch(np.tile(np.array(text) + 5, (samples, 1)), range(samples))
    read = batch.input_ids_BT.numpy()
    rows, places = np.divmod(batch.target_index_N.numpy(), PLACES + 2)
    losses = [
        -np.log(chances[tuple(None if id_ == MASK else id_ - 5 for id_ in read[row, 1:-1].tolist())][place - 1, token])
        for row, place, token in zip(rows, places, batch.target_ids_N.numpy() - 5, strict=True)
    ]
    assert batch.weight_N is not None
    return float((batch.weight_N.numpy() * losses).sum() / samples)


def log_chance(chances: Chances, text: tuple[int, ...], order: tuple[int, ...]) -> float:
    """Of a text that is written in an order of its places."""
    seen: list[int | None] = [None] * PLACES
    total = 0.0
    for place in order:
        total += np.log(chances[tuple(seen)][place, text[place]])
        seen[place] = text[place]
    return total


@pytest.mark.parametrize("text", [(0, 0, 0), (3, 1, 2), (2, 2, 1)])
def test_the_loss_of_an_exact_model_is_minus_the_log_of_the_texts_probability(text: tuple[int, ...]) -> None:
    joint = np.random.default_rng(0).dirichlet(np.ones(IDS**PLACES)).reshape((IDS,) * PLACES)
    assert mean_loss(conditionals(joint), text) == pytest.approx(-np.log(joint[text]), rel=0.02)


@pytest.mark.parametrize("text", [(0, 0, 0), (3, 1, 2), (2, 2, 1)])
def test_the_loss_of_any_model_is_the_mean_over_orders_and_bounds_what_it_writes(text: tuple[int, ...]) -> None:
    """Written one token at a time in a random order, a text has the mean of the orders' probabilities."""
    chances, orders = of_anything(), list(permutations(range(PLACES)))
    logs = np.array([log_chance(chances, text, order) for order in orders])
    found = mean_loss(chances, text)
    assert found == pytest.approx(-logs.mean(), rel=0.02)
    assert found > -np.log(np.exp(logs).mean()) + 0.02
