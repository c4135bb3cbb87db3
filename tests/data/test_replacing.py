"""Replaced-token detection: which tokens are judged, and the random numbers that replace masked ones."""

from __future__ import annotations

import numpy as np
import pytest

from megahead.config.masking import MaskingConfig
from megahead.data.framing import Framing
from megahead.data.masking import Masker, Replacing
from megahead.data.strategies import Uniform

CLS, SEP, MASK, END, PAD, VOCABULARY = 1, 2, 3, 4, 0, 1000


def replacing(seed: int = 7) -> Replacing:
    masking = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, special_tokens=[PAD])
    return Replacing(Masker(Framing(masking, END, isolate_documents=True), Uniform(), VOCABULARY, seed), seed)


def texts(rows: int, length: int = 30) -> np.ndarray:
    text = np.random.default_rng(0).integers(5, VOCABULARY, (rows, length))
    text[:, 10], text[::3, 5], text[::2, 20:] = END, PAD, -1
    return text


def test_every_token_is_judged_but_special_ones_and_padding() -> None:
    rows, plain = replacing(), replacing().masker.framing.rows(texts(50))
    batch = rows.batch(texts(50), range(50))
    assert batch.replaced is not None
    judged = np.zeros(plain.tokens_BT.size, bool)
    judged[batch.replaced.judged_P.numpy()] = True
    assert (judged.reshape(plain.tokens_BT.shape) == plain.maskable_BT).all()
    assert judged[batch.target_index_N.numpy()].all()
    assert batch.judged() == judged.sum() < judged.size


def test_rows_are_masked_as_they_are_without() -> None:
    with_draws, without = replacing().batch(texts(8), range(8)), replacing().masker.batch(texts(8), range(8))
    assert (with_draws.input_ids_BT == without.input_ids_BT).all()
    assert (with_draws.target_index_N == without.target_index_N).all()
    assert without.replaced is None
    assert without.judged() == 0


def test_a_samples_random_numbers_are_its_own_in_any_batch_and_others_by_another_seed_or_number() -> None:
    text = np.tile(texts(1), (8, 1))
    together = replacing().batch(text, range(100, 108))
    assert together.replaced is not None
    per_row = together.target_index_N.numpy() // together.input_ids_BT.shape[1]
    draws = []
    for place in range(8):
        alone = replacing().batch(text[:1], [100 + place]).replaced
        assert alone is not None
        draws.append(tuple(alone.draw_N.tolist()))
        assert (alone.draw_N == together.replaced.draw_N[per_row == place]).all()
    assert len(set(draws)) == 8
    other = replacing(seed=8).batch(text, range(100, 108)).replaced
    assert other is not None
    assert not set(other.draw_N.tolist()) & set(together.replaced.draw_N.tolist())


def test_random_numbers_are_uniform_whatever_was_masked() -> None:
    batch = replacing().batch(texts(4000), range(4000))
    assert batch.replaced is not None
    draw_N = batch.replaced.draw_N.numpy()
    counts, expected = np.histogram(draw_N, 10, (0, 1))[0], len(draw_N) / 10
    assert counts == pytest.approx(expected, abs=5 * expected**0.5)
    assert draw_N.min() > 0
    assert draw_N.max() < 1
