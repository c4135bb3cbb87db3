"""Replaced-token detection: which tokens are classified, and the random numbers that replace masked ones."""

from __future__ import annotations

import numpy as np
import pytest

from megahead.data.batch import EncoderRowBuilder, RowCollator
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import Uniform
from megahead.objectives.auxiliary import add_auxiliary
from megahead.objectives.replaced_tokens import ReplacedTokens
from support.small_checkpoint import small_config

CLS, SEP, MASK, END, PAD, VOCABULARY = 1, 2, 3, 4, 0, 1000


CONFIG = small_config(
    model={"family": "bert", "vocab_size": VOCABULARY, "max_positions": 64},
    data={"end_token": END, "sequence_length": 32, "isolate_documents": True},
    masking={"mask_token": MASK, "cls_token": CLS, "sep_token": SEP, "special_tokens": [PAD]},
    objective={"replaced_tokens": {}},
)


def collator(seed: int = 7) -> MaskingCollator:
    assert CONFIG.masking is not None
    return MaskingCollator(EncoderRowBuilder(CONFIG.masking, END, isolate_documents=True), Uniform(), VOCABULARY, seed)


def replacing(seed: int = 7) -> RowCollator:
    return add_auxiliary(collator(seed), CONFIG, seed)


def texts(rows: int, length: int = 30) -> np.ndarray:
    text = np.random.default_rng(0).integers(5, VOCABULARY, (rows, length))
    text[:, 10], text[::3, 5], text[::2, 20:] = END, PAD, -1
    return text


def test_every_token_is_judged_but_special_ones_and_padding() -> None:
    rows, plain = replacing(), collator().row_builder.build(texts(50))
    batch = rows.batch(texts(50), range(50))
    classified = np.zeros(plain.tokens_BT.size, bool)
    classified[batch.auxiliary.classified_P.numpy()] = True
    assert (classified.reshape(plain.tokens_BT.shape) == plain.maskable_BT).all()
    assert classified[batch.target_index_N.numpy()].all()
    assert ReplacedTokens.num_loss_terms(batch) == classified.sum() < classified.size


def test_rows_are_masked_as_they_are_without() -> None:
    with_draws, without = replacing().batch(texts(8), range(8)), collator().batch(texts(8), range(8))
    assert (with_draws.input_ids_BT == without.input_ids_BT).all()
    assert (with_draws.target_index_N == without.target_index_N).all()
    assert without.auxiliary == ()


def test_a_samples_random_numbers_are_its_own_in_any_batch_and_others_by_another_seed_or_number() -> None:
    text = np.tile(texts(1), (8, 1))
    together = replacing().batch(text, range(100, 108))
    per_row = together.target_index_N.numpy() // together.input_ids_BT.shape[1]
    draws = []
    for place in range(8):
        alone = replacing().batch(text[:1], [100 + place]).auxiliary
        draws.append(tuple(alone.uniform_N.tolist()))
        assert (alone.uniform_N == together.auxiliary.uniform_N[per_row == place]).all()
    assert len(set(draws)) == 8
    other = replacing(seed=8).batch(text, range(100, 108)).auxiliary
    assert not set(other.uniform_N.tolist()) & set(together.auxiliary.uniform_N.tolist())


def test_random_numbers_are_uniform_whatever_was_masked() -> None:
    batch = replacing().batch(texts(4000), range(4000))
    uniform_N = batch.auxiliary.uniform_N.numpy()
    counts, expected = np.histogram(uniform_N, 10, (0, 1))[0], len(uniform_N) / 10
    assert counts == pytest.approx(expected, abs=5 * expected**0.5)
    assert uniform_N.min() > 0
    assert uniform_N.max() < 1
