"""A decoder's masked inputs: how many, never an end token, targets untouched, the same draw alone and in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megahead.config.data import DataConfig
from megahead.config.masking import MaskedInputsConfig
from megahead.data.batch import CausalCollator, MaskedInputCollator
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import held_out_collator, training_collator
from megahead.errors import ConfigError
from support.causal_rows import causal_batch
from support.small_run import small_config, write_text

END, MASK = 0, 60
PLAIN: dict[str, Any] = {"end_token": END, "isolate_documents": True, "boundary_targets": False}


def masked(share: float = 0.15, seed: int = 5) -> MaskedInputCollator:
    data = DataConfig(train="text", sequence_length=40, boundary_targets=False)
    return MaskedInputCollator(MaskedInputsConfig(mask_token=MASK, share=share), data, seed)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 12, (count, 41))  # one token in twelve ends a document


@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_each_row_has_its_rounded_share_masked_and_never_an_end_token(share: float) -> None:
    text = rows(50)
    read = masked(share).batch(text, range(50)).input_ids_BT.numpy()
    hidden = read == MASK
    ordinary = text[:, :-1] != END
    assert not (hidden & ~ordinary).any()
    assert (hidden.sum(1) == np.rint(share * ordinary.sum(1))).all()
    assert (read[~hidden] == text[:, :-1][~hidden]).all()


def test_all_places_are_masked_alike() -> None:
    text = np.full((4000, 41), 7)
    shares = (masked().batch(text, range(4000)).input_ids_BT == MASK).double().mean(0)
    assert shares.mean().item() == pytest.approx(0.15)
    assert (shares - 0.15).abs().max() < 0.025  # more than four standard deviations


def test_targets_and_documents_are_those_of_the_text() -> None:
    text = rows(20)
    text[3, 30:] = -1  # the rest of a packed row is empty
    batch, plain = masked().batch(text, range(20)), causal_batch(text, **PLAIN)
    assert torch.equal(batch.target_index_N, plain.target_index_N)
    assert torch.equal(batch.target_ids_N, plain.target_ids_N)
    assert batch.positions_BT is not None
    assert plain.positions_BT is not None
    assert torch.equal(batch.positions_BT, plain.positions_BT)
    assert MASK not in batch.input_ids_BT[3, 30:]


def test_a_sample_is_masked_alike_alone_and_in_any_batch_and_otherwise_by_another_seed_or_number() -> None:
    text = np.tile(rows(1), (8, 1))
    together = masked().batch(text, range(100, 108)).input_ids_BT
    for place in range(8):
        assert torch.equal(masked().batch(text[:1], [100 + place]).input_ids_BT[0], together[place])
    assert len({tuple(row.tolist()) for row in together}) == 8
    assert not torch.equal(masked(seed=6).batch(text, range(100, 108)).input_ids_BT, together)


def test_a_mask_token_that_the_text_has_is_refused(tmp_path: Path) -> None:
    datasets = [IndexedDataset(write_text(tmp_path))]
    config = small_config(tmp_path, {"masked_inputs": {"mask_token": 7}})
    with pytest.raises(
        ConfigError, match=r"`masked_inputs.mask_token` must be an id that .*text does not have, but is 7"
    ):
        training_collator(config, datasets)
    beyond = small_config(tmp_path, {"model.vocab_size": 61, "masked_inputs": {"mask_token": 60}})
    assert isinstance(training_collator(beyond, datasets), MaskedInputCollator)
    assert isinstance(held_out_collator(beyond), CausalCollator)  # held-out text is read as it is
