"""Phrases that rows share: against a slow search of all runs of tokens, and how many of the masked tokens they are."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Literal

import numpy as np
import pytest

from megahead.config.auxiliaries import PhrasesConfig
from megahead.config.masking import MaskingConfig
from megahead.data.batch import Batch, EncoderRowBuilder
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import Spans, Uniform
from megahead.data.strategy import Strategy, WeightedIds
from megahead.objectives.phrases import PhraseCollator, SharedPhrases

CLS, SEP, MASK, END, PAD, VOCABULARY = 1, 2, 3, 4, 0, 40
STRATEGIES: dict[str, Strategy] = {
    "uniform": Uniform(),
    "spans": Spans(0.3, 6),
    "weighted": WeightedIds(np.arange(1.0, 1 + VOCABULARY)),
}


def collator(
    phrases: PhrasesConfig | None,
    strategy: Strategy = STRATEGIES["uniform"],
    count: Literal["fixed", "bernoulli"] = "fixed",
) -> MaskingCollator | PhraseCollator:
    ids = {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "special_tokens": [PAD]}
    masking = MaskingConfig.model_validate(ids | {"rate": 0.3, "count": count})
    plain = MaskingCollator(EncoderRowBuilder(masking, END, isolate_documents=True), strategy, VOCABULARY, 7)
    return plain if phrases is None else PhraseCollator(plain, phrases)


def texts(rows: int, length: int = 40) -> np.ndarray:
    """Every other row has a piece of one of three sentences, so that long phrases recur; special tokens, padding."""
    generator = np.random.default_rng(0)
    text = generator.integers(5, VOCABULARY, (rows, length))
    sentences = np.random.default_rng(1).integers(5, VOCABULARY, (3, length))
    for row in range(0, rows, 2):
        begin = int(generator.integers(length // 4, length // 2))
        text[row, begin : begin + length // 2] = sentences[row // 4 % 3, begin : begin + length // 2]
    text[:, 10], text[::3, 5], text[::5, -6:] = END, PAD, -1
    return text


def tokens_of(batch: Batch) -> list[list[int]]:
    """The rows before any of their tokens was masked."""
    flat = batch.input_ids_BT.flatten().index_copy(0, batch.target_index_N, batch.target_ids_N)
    return flat.view_as(batch.input_ids_BT).tolist()  # type: ignore[no-any-return]


def searched(rows: list[list[int]], asked: PhrasesConfig) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """The first and last place of each phrase of a group, cut from left to right, and those of the same ones in other
    rows; places count through the rows. A document ends before each row's token 21."""
    width, found, texts_of = len(rows[0]), defaultdict(set), {}
    for row, first, length in product(range(len(rows)), range(width), range(1, asked.longest + 1)):
        text = tuple(rows[row][first : first + length])
        if len(text) == length and min(text) > END and not first <= 20 < first + length - 1:
            place = row * width + first
            texts_of[place, place + length - 1] = text
            found[text].add((place, place + length - 1))
    phrases, place = {}, 0
    while place < len(rows) * width:
        for last in range(place + asked.longest - 1, place + asked.shortest - 2, -1):
            same = found[texts_of.get((place, last), ())]
            if others := {other for other in same if other[0] // width != place // width}:
                phrases[place, last], place = others, last
                break
        place += 1
    return phrases


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(2, 10), (3, 4)], ids=str)
@pytest.mark.parametrize("count", ["fixed", "bernoulli"])
def test_phrases_of_other_rows_are_masked_whole_and_found_where_they_are_read(
    strategy: str, lengths: tuple[int, int], count: Literal["fixed", "bernoulli"]
) -> None:
    asked = PhrasesConfig(shortest=lengths[0], longest=lengths[1], group_samples=4, share=0.7)
    starts = np.zeros((12, 40), bool)
    starts[:, 20] = True  # a document that begins without an end token before it
    batch = collator(asked, STRATEGIES[strategy], count).batch(texts(12), range(12), starts)
    tokens, width = tokens_of(batch), batch.input_ids_BT.shape[1]
    masked, seen = set(batch.target_index_N.tolist()), set()
    assert all(tokens[place // width][place % width] > END for place in masked)
    assert len(batch.auxiliary) == 3
    for group, part in enumerate(batch.auxiliary):
        at, pairs = 4 * group * width, set()
        for (first, last), others in searched(tokens[4 * group :][:4], asked).items():
            seen.add(last - first + 1)
            assert len({at + place in masked for place in range(first, last + 1)}) == 1  # all or none
            if at + first in masked:
                ends = {(first, first_other) for first_other, _ in others} | {(last, other) for _, other in others}
                pairs |= {(at + mine, at + theirs) for mine, theirs in ends if at + theirs not in masked}
        text = {place for place in range(at, at + 4 * width) if tokens[place // width][place % width] > END}
        mine, candidates = part.ends_Q.tolist(), part.candidates_K.tolist()
        assert candidates == sorted(text - masked)
        assert mine == sorted({end for end, _ in pairs})
        right = zip(mine, part.positives_QR.tolist(), strict=True)
        assert sorted((end, candidates[k]) for end, ks in right for k in ks if k >= 0) == sorted(pairs)
    assert seen >= set(lengths)


@pytest.mark.parametrize("count", ["fixed", "bernoulli"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_phrases_are_that_share_of_the_masked_tokens_which_are_as_many_as_without(
    share: float, count: Literal["fixed", "bernoulli"]
) -> None:
    """Of a `fixed` number a little less, since long phrases often do not fit in any more."""
    asked = PhrasesConfig(share=share, shortest=3, longest=4, group_samples=16)
    text = texts(2000, 120)[::2]  # some 60 tokens of each row are in phrases
    batch, plain = (collator(phrases, count=count).batch(text, range(len(text))) for phrases in (asked, None))
    assert len(batch.target_ids_N) == pytest.approx(len(plain.target_ids_N), rel=0.02)
    shared = SharedPhrases.of(collator(None).row_builder.build(text), asked)
    inside_M = np.zeros(batch.input_ids_BT.numel(), bool)
    for first, length in zip(shared.first_S, shared.length_S, strict=True):
        inside_M[first : first + length] = True
    assert inside_M[batch.target_index_N.numpy()].mean() == pytest.approx(
        share, abs=0.01 if count == "bernoulli" else 0.07
    )


def test_groups_are_their_own_in_any_batch() -> None:
    rows, text = collator(PhrasesConfig(group_samples=4, longest=3)), texts(16)
    together = rows.batch(text, range(32, 48))
    for size in (4, 8):
        for first in range(0, 16, size):
            part = rows.batch(text[first : first + size], range(32 + first, 32 + first + size))
            assert (part.input_ids_BT == together.input_ids_BT[first : first + size]).all()
            before = first * part.input_ids_BT.shape[1]
            for one, other in zip(part.auxiliary, together.auxiliary[first // 4 :], strict=False):
                assert (one.ends_Q + before == other.ends_Q).all()
                assert (one.candidates_K + before == other.candidates_K).all()
                assert (one.positives_QR == other.positives_QR).all()
                assert len(one.ends_Q) > 0


def test_rows_that_share_nothing_are_masked_as_without() -> None:
    text = np.arange(5, 5 + 4 * 8).reshape(4, 8)
    batch, plain = (collator(phrases).batch(text, range(4)) for phrases in (PhrasesConfig(group_samples=4), None))
    assert (batch.input_ids_BT == plain.input_ids_BT).all()
    assert len(batch.target_ids_N) == 4 * round(0.3 * 8)
    assert all(len(part.ends_Q) == 0 < len(part.candidates_K) for part in batch.auxiliary)
