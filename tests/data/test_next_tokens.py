"""Next tokens of an encoder's rows: the definition written as loops, and the same text as where tokens are masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megahead.config.masking import MaskingConfig
from megahead.data.batch import CausalEncoderCollator, EncoderRowBuilder
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import Uniform

CLS, SEP, MASK, END = 1, 2, 3, 4
MASKING = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK)


def texts(ends: float = 0.2) -> np.ndarray:
    """Five rows of 14 tokens, the last two of which are not full."""
    generator = np.random.default_rng(0)
    text = generator.integers(5, 50, (5, 14))
    text[generator.random(text.shape) < ends] = END
    text[3, 9:] = text[4] = -1
    return text


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("boundary", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_it_equals_the_definition(isolate: bool, boundary: bool, known: bool) -> None:
    """`known`: documents begin at places that the dataset names, too."""
    text = texts()
    starts = np.zeros(text.shape, bool)
    starts[0, 5] = starts[1, 0] = known
    batch = CausalEncoderCollator(EncoderRowBuilder(MASKING, END, isolate), boundary).batch(
        text, range(5), starts if known else None
    )
    places, targets = [], []
    for row, (tokens, begins) in enumerate(zip(text.tolist(), starts.tolist(), strict=True)):
        whole = [CLS, *(token for token in tokens if token >= 0), SEP]
        read = whole + [END] * (16 - len(whole))
        assert batch.input_ids_BT[row].tolist() == read
        for place, token in enumerate(whole[1:-1]):
            first = place > 0 and (whole[place] == END or begins[place])
            if boundary or not first:
                places.append(16 * row + place)
                targets.append(token)
    assert batch.target_index_N.tolist() == places
    assert batch.target_ids_N.tolist() == targets
    assert batch.max_targets_per_row is None
    assert batch.token_subsets == ()
    assert {batch.input_ids_BT.dtype, batch.target_index_N.dtype, batch.target_ids_N.dtype} == {torch.int64}


@pytest.mark.parametrize("isolate", [True, False])
def test_a_sample_is_the_same_text_whether_masked_or_not(isolate: bool) -> None:
    masked = MaskingCollator(EncoderRowBuilder(MASKING, END, isolate), Uniform(), 50, seed=7).batch(texts(), range(5))
    batch = CausalEncoderCollator(EncoderRowBuilder(MASKING, END, isolate), True).batch(texts(), range(5))
    original = masked.input_ids_BT.flatten().index_copy(0, masked.target_index_N, masked.target_ids_N)
    assert torch.equal(batch.input_ids_BT.flatten(), original)
    assert batch.positions_BT is not None
    assert masked.positions_BT is not None
    assert torch.equal(batch.positions_BT, masked.positions_BT)
