"""Masked rows: what is framed, selected and read; the same for a sample wherever and with whom it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megahead.config.masking import MaskingConfig
from megahead.data.batch import EncoderRowBuilder
from megahead.data.masking import MaskingCollator
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategies import Uniform
from megahead.losses.candidates import evaluation_target_counts
from support.small_run import small_config

CLS, SEP, MASK, END, PAD, VOCABULARY = 1, 2, 3, 4, 0, 1000


def collator(
    seed: int = 7, isolate: bool = True, steps: int = 1, samples_per_step: int = 1, **settings: Any
) -> MaskingCollator:
    ids = {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "special_tokens": [PAD]}
    config = MaskingConfig(**ids, **settings)
    return MaskingCollator(
        EncoderRowBuilder(config, END, isolate), Uniform(), VOCABULARY, seed, samples_per_step, steps
    )


def texts(rows: int, length: int = 126, ends: float = 0.0, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    text = generator.integers(5, VOCABULARY, (rows, length))
    text[generator.random(text.shape) < ends] = END
    return text


def test_a_row_is_cls_text_sep_and_targets_are_the_tokens_as_they_were() -> None:
    text = texts(50)
    batch = collator().batch(text, range(50))
    inputs = batch.input_ids_BT.numpy()
    whole = np.concatenate([np.full((50, 1), CLS), text, np.full((50, 1), SEP)], 1)
    assert np.array_equal(batch.target_ids_N.numpy(), whole.reshape(-1)[batch.target_index_N.numpy()])
    untouched = np.ones(inputs.size, bool)
    untouched[batch.target_index_N.numpy()] = False
    assert np.array_equal(inputs.reshape(-1)[untouched], whole.reshape(-1)[untouched])


def test_every_row_has_the_same_number_of_targets_fifteen_percent_of_its_text() -> None:
    batch = collator().batch(texts(200, ends=0.05), range(200))
    per_row = np.bincount(batch.target_index_N.numpy() // 128, minlength=200)
    assert set(per_row) == {19} == {batch.max_targets_per_row}  # 0.15 x 126


def test_bernoulli_draws_each_token_by_itself() -> None:
    batch = collator(count="bernoulli").batch(texts(4000), range(4000))
    per_row = np.bincount(batch.target_index_N.numpy() // 128, minlength=4000)
    assert per_row.mean() == pytest.approx(0.15 * 126, rel=0.01)
    assert per_row.var() == pytest.approx(126 * 0.15 * 0.85, rel=0.1)
    assert batch.max_targets_per_row == per_row.max()


def test_special_tokens_and_padding_are_never_selected_nor_put_in() -> None:
    text = texts(500, ends=0.2)
    text[:, 90:] = -1
    text[::3, 5] = PAD
    batch = collator(random_share=0.9, mask_share=0.0, rate=0.5).batch(text, range(500))
    special = [CLS, SEP, MASK, END, PAD]
    assert not np.isin(batch.target_ids_N.numpy(), special).any()
    assert (batch.target_index_N.numpy() % 128 <= 90).all()
    assert not np.isin(batch.input_ids_BT.numpy().reshape(-1)[batch.target_index_N.numpy()], special).any()


@pytest.mark.parametrize(("mask", "random"), [(0.8, 0.1), (1.0, 0.0), (0.0, 0.5)])
def test_shares_of_masked_random_and_kept_tokens(mask: float, random: float) -> None:
    batch = collator(mask_share=mask, random_share=random).batch(texts(2000), range(2000))
    read = batch.input_ids_BT.numpy().reshape(-1)[batch.target_index_N.numpy()]
    target = batch.target_ids_N.numpy()
    masked, kept = read == MASK, read == target
    assert masked.mean() == pytest.approx(mask, abs=0.01)
    assert kept.mean() == pytest.approx(1 - mask - random, abs=0.01)
    drawn = read[~masked & ~kept]
    if random:
        assert drawn.min() >= 5
        counts = np.bincount(drawn, minlength=VOCABULARY)[5:]
        mean = counts.mean()
        assert ((counts - mean) ** 2).sum() / mean == pytest.approx(len(counts), rel=0.25)  # chi-square of uniform


def test_noise_is_read_where_nothing_is_asked_for_and_never_in_place_of_a_special_token() -> None:
    text = texts(2000)
    text[:, 90:], text[::3, 5] = -1, PAD
    plain, noisy = (collator(**settings).batch(text, range(2000)) for settings in ({}, {"noise_share": 0.2}))
    assert torch.equal(noisy.target_index_N, plain.target_index_N)
    assert torch.equal(noisy.target_ids_N, plain.target_ids_N)
    before, after = plain.input_ids_BT.reshape(-1), noisy.input_ids_BT.reshape(-1)
    assert torch.equal(after[noisy.target_index_N], before[plain.target_index_N])
    special = torch.isin(before, torch.tensor([CLS, SEP, END, PAD]))
    others = torch.ones_like(special).index_fill(0, plain.target_index_N, False) & ~special
    assert torch.equal(after[special], before[special])
    read = after[others][after[others] != before[others]]
    assert len(read) / int(others.sum()) == pytest.approx(0.2 * (1 - 1 / (VOCABULARY - 5)), abs=0.005)
    assert not np.isin(read, [CLS, SEP, MASK, END, PAD]).any()


def test_every_place_is_selected_alike() -> None:
    batch = collator().batch(texts(8000), range(8000))
    counts = np.bincount(batch.target_index_N.numpy() % 128, minlength=128)
    assert counts[0] == counts[127] == 0
    expected = 8000 * 19 / 126
    assert np.abs(counts[1:127] - expected).max() < 5 * np.sqrt(expected)


def test_a_sample_is_masked_the_same_in_any_company_and_differently_in_another_epoch() -> None:
    text = texts(8)
    together = collator().batch(text, range(8))
    alone = collator().batch(text[5:6], [5])
    assert np.array_equal(together.input_ids_BT[5:6], alone.input_ids_BT)
    again, other_seed = collator().batch(text[5:6], [5 + 8]), collator(seed=8).batch(text[5:6], [5])
    for another in (again, other_seed):
        assert not np.array_equal(another.target_index_N, alone.target_index_N)


@pytest.mark.parametrize(
    ("course", "rates"), [("linear", (0.4, 0.3, 0.2, 0.1)), ("cosine", (0.4, 0.325, 0.175, 0.1))], ids=str
)
def test_the_rate_moves_with_the_run_and_is_one_for_a_step(course: str, rates: tuple[float, ...]) -> None:
    moving = collator(rate=0.4, final_rate=0.1, rate_course=course, steps=4, samples_per_step=2)
    batch = moving.batch(texts(10), range(10))
    per_row = np.bincount(batch.target_index_N.numpy() // 128, minlength=10)
    assert per_row.tolist() == [round(126 * rate) for rate in (*rates, rates[-1]) for _ in range(2)]


def test_the_rates_course_begins_with_the_first_step_that_masks() -> None:
    moving = collator(rate=0.4, final_rate=0.1, steps=7, samples_per_step=2)
    late = replace(moving, steps_before_masking=3)
    batch = late.batch(texts(8), range(6, 14))
    per_row = np.bincount(batch.target_index_N.numpy() // 128, minlength=8)
    assert per_row.tolist() == [round(126 * rate) for rate in (0.4, 0.3, 0.2, 0.1) for _ in range(2)]


def test_documents_are_told_apart_where_asked() -> None:
    text = texts(1, length=8)
    text[0, 2] = END
    positions = collator().batch(text, [0]).positions_BT
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    text[0, -1] = END  # [SEP] belongs to the document that it closes
    assert collator().batch(text, [0]).positions_BT.tolist() == positions.tolist()
    assert collator(isolate=False).batch(text, [0]).positions_BT is None
    assert collator().batch(texts(1, length=8), [0]).positions_BT is None


@pytest.mark.parametrize("isolate", [True, False])
def test_padding_is_a_document_behind_sep(isolate: bool) -> None:
    text = texts(2, length=8)
    text[1, 5:] = -1
    batch = collator(isolate=isolate).batch(text, [0, 1])
    assert batch.input_ids_BT[1, 6] == SEP
    assert batch.positions_BT.tolist() == [list(range(10)), [*range(7), 0, 1, 2]]


def test_a_row_without_text_has_no_targets() -> None:
    batch = collator().batch(np.full((2, 8), -1), [0, 1])
    assert batch.target_ids_N.numel() == batch.max_targets_per_row == 0


def test_noise_is_uniform_and_apart_by_sample_place_and_purpose() -> None:
    rng = CounterRng(3, np.arange(2000))
    draws = rng.uniform(1, 50)
    assert draws.min() > 0
    assert draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005)
    assert np.histogram(draws, 20, (0, 1))[0] == pytest.approx(5000, rel=0.06)
    assert len(np.unique(draws)) == draws.size
    for other in (rng.uniform(2, 50), CounterRng(4, np.arange(2000)).uniform(1, 50), np.roll(draws, 1, 0)):
        assert abs(np.corrcoef(draws.reshape(-1), other.reshape(-1))[0, 1]) < 0.02
    assert np.array_equal(CounterRng(3, [1999]).uniform(1, 50), draws[-1:])


def test_ids_that_weigh_almost_nothing_are_chosen_last_but_before_places_that_are_not_allowed() -> None:
    rng, allowed_BW = CounterRng(0, range(2000)), np.tile([False, True, True, True], (2000, 1))
    weight_BW = np.where(allowed_BW, np.array([1.0, 5e-324, 1e-300, 1.0]), 1.0)
    for count, chosen in enumerate(([3], [2, 3], [1, 2, 3]), start=1):
        chosen_BW = rng.choice(Purpose.DIFFUSION_POSITIONS, allowed_BW, np.full(2000, count), weight_BW)
        assert chosen_BW[:, chosen].all(), count


def test_how_often_ids_would_be_targets_is_not_known_of_a_text_without_counts() -> None:
    changes = {
        "model.family": "bert",
        "data.tokenizer": "words.json",
        "masking": {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "strategy": "whole_word"},
    }
    config = small_config(Path(), changes | {"model.vocab_size": 64})
    assert evaluation_target_counts(config, torch.zeros(64, dtype=torch.int64)) is None
    counts_V = evaluation_target_counts(config, torch.ones(64, dtype=torch.int64))
    assert counts_V is not None
    assert counts_V.sum() == 64 - 4


def test_each_purpose_has_random_numbers_of_its_own() -> None:
    rng = CounterRng(3, [0])
    assert len({rng.uniform(purpose, 1).item() for purpose in Purpose}) == len(Purpose.__members__)


@pytest.mark.parametrize("special", [[0, 1, 4], [3, 2, 4], [4, 5, 6], [5, 8, 0]])
def test_ordinary_ids_are_those_without_the_special_ones(special: list[int]) -> None:
    config = MaskingConfig(cls_token=special[0], sep_token=special[1], mask_token=special[2])
    ordinary = MaskingCollator(EncoderRowBuilder(config, special[0], False), Uniform(), 7, seed=0)._ordinary_ids
    assert ordinary.tolist() == [id_ for id_ in range(7) if id_ not in special]
