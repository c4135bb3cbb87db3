"""Token dropping keeps as many tokens of each row: masks, special ones, then those that were missed most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megahead.config.loading import config_from_dict
from megahead.config.masking import DroppingConfig, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, EncoderRowBuilder
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import training_collator
from megahead.data.masking import MaskingCollator, TokenSubsets
from megahead.data.strategies import STRATEGIES, Hardest, Uniform
from megahead.data.strategy import Strategy, TargetErrorCounts, WeightedIds
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.errors import ConfigError

CLS, SEP, MASK, V, EVERY, SAMPLES = 1, 2, 3, 100, 3, 8
SMALL: dict[str, Any] = {"size": "bert-small", "vocab_size": V}
MODEL = ModelConfig(**SMALL)


def collator(importance: Strategy, keep_share: float = 0.5, **settings: Any) -> MaskingCollator:
    asked = DroppingConfig(from_layer=1, keep_share=keep_share)
    config = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, dropping=asked, **settings)
    row_builder = EncoderRowBuilder(config, SEP, False)
    subsets = TokenSubsets(row_builder, MODEL, importance)
    return MaskingCollator(row_builder, Uniform(), V, seed=5, samples_per_step=SAMPLES, steps=1000, subsets=subsets)


def texts(rows: int, length: int = 62) -> np.ndarray:
    return np.random.default_rng(0).integers(4, V, (rows, length))


def kept(batch: Batch) -> np.ndarray:
    """bool [B, T]."""
    (part,) = batch.token_subsets
    assert part.layers == range(1, 3)
    assert part.first_layer_attends_to_all
    kept_BT = np.zeros(batch.input_ids_BT.shape, bool)
    kept_BT.reshape(-1)[part.index_N.numpy()] = True
    assert kept_BT.sum(1).max() == part.max_per_row
    return kept_BT


def test_the_most_important_tokens_are_kept_as_many_in_each_row() -> None:
    """By what is read: a target that is read as another token is as important as that one."""
    weight_V = np.random.default_rng(1).permutation(V) + 1.0
    batch = collator(WeightedIds(weight_V)).batch(texts(50), range(50))
    read_BT, kept_BT = batch.input_ids_BT.numpy(), kept(batch)
    assert (kept_BT.sum(1) == 32).all()
    special_BT = np.isin(read_BT, [CLS, SEP, MASK])
    assert kept_BT[special_BT].all()
    for read, special, keeps in zip(read_BT, special_BT, kept_BT, strict=True):
        assert weight_V[read[keeps & ~special]].min() >= weight_V[read[~keeps]].max()
    seen = np.bincount(batch.target_index_N.numpy(), minlength=read_BT.size).astype(bool)
    assert not kept_BT.reshape(-1)[seen].all()  # targets that are read as unimportant tokens


def test_masks_are_kept_first_and_what_is_empty_last() -> None:
    text = texts(20)
    text[:, 40:] = -1
    text[:, 5:15] = SEP
    batch = collator(Uniform(), keep_share=0.3, rate=0.3, mask_share=1.0, random_share=0.0).batch(text, range(20))
    read_BT, kept_BT = batch.input_ids_BT.numpy(), kept(batch)
    assert (kept_BT.sum(1) == 19).all()
    assert kept_BT[read_BT == MASK].all()
    assert (read_BT[kept_BT] == SEP).any()
    assert np.isin(read_BT[kept_BT], [MASK, SEP, CLS]).all()  # more than there is room for
    assert not kept_BT[:, 42:].any()
    roomy_BT = kept(collator(Uniform(), keep_share=0.6).batch(text, range(20)))
    assert (roomy_BT.sum(1) == 38).all()
    assert not roomy_BT[:, 42:].any()


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("length", range(14, 63, 4))
def test_the_least_share_that_is_accepted_keeps_every_mask_token(share: float, length: int) -> None:
    """Though all targets of a row are mask tokens."""
    assert run_config("hardest", rate=share, keep_share=share).masking is not None
    settings = {"rate": share, "mask_share": 1.0, "random_share": 0.0}
    batch = collator(Uniform(), keep_share=share, **settings).batch(texts(20, length), range(20))
    assert kept(batch)[batch.input_ids_BT.numpy() == MASK].all()


@pytest.mark.parametrize("rows", [range(7, 8), range(4, 12)], ids=str)
def test_what_is_kept_depends_on_the_sample_alone(rows: range) -> None:
    """Also among tokens that are all as important."""
    text = texts(20)
    every, some = (collator(Uniform()).batch(text[list(part)], part) for part in (range(20), rows))
    assert (kept(every)[list(rows)] == kept(some)).all()
    assert len(np.unique(kept(every), axis=0)) == 20


def test_ids_that_are_missed_more_often_are_kept_two_periods_later() -> None:
    target_error_counts = TargetErrorCounts(V, EVERY, SAMPLES)
    hard = torch.arange(V) >= 60
    for step in range(EVERY):
        target_error_counts.record(torch.arange(V), hard)
        target_error_counts.end_step((step + 1) * SAMPLES, True, Group())
    text, adapting = texts(SAMPLES), collator(Hardest(np.ones(V), target_error_counts), keep_share=0.4)

    def share_of_hard(step: int) -> float:
        batch = adapting.batch(text, range(step * SAMPLES, (step + 1) * SAMPLES))
        read_BT, kept_BT = batch.input_ids_BT.numpy(), kept(batch)
        ordinary_BT = read_BT > MASK
        return float((read_BT[kept_BT & ordinary_BT] >= 60).mean())

    assert share_of_hard(EVERY) == pytest.approx(0.42, abs=0.15)
    assert share_of_hard(2 * EVERY) > 0.9


def run_config(by: str, rate: float = 0.15, keep_share: float = 0.5) -> RunConfig:
    dropping = {"from_layer": 1, "by": by, "keep_share": keep_share}
    masking = {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "rate": rate, "dropping": dropping}
    return config_from_dict(
        {
            "name": "x",
            "model": SMALL,
            "data": {"train": "x", "sequence_length": 64, "end_token": SEP},
            "masking": masking,
            "batch": {"global_size": 4, "micro_size": 4},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 3},
        }
    )


@pytest.mark.parametrize("by", ["hardest", "frequency", "informative"])
def test_a_run_keeps_what_it_asks_for(tmp_path: Path, by: str) -> None:
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=V) as writer:
        writer.add_document([*texts(1, 2000)[0].tolist(), SEP])
    dataset = IndexedDataset(tmp_path / "text")
    made = training_collator(run_config(by), [dataset], TargetErrorCounts(V, 5, 4))
    assert isinstance(made, MaskingCollator)
    assert isinstance(made.subsets.importance, {"hardest": Hardest}.get(by, WeightedIds))
    assert (kept(made.batch(texts(4), range(4))).sum(1) == 32).all()
    assert by in STRATEGIES
    (tmp_path / "text.json").unlink()
    with pytest.raises(ConfigError, match=rf"`masking.dropping.by` must have a dataset with .* but is {by} instead"):
        training_collator(run_config(by), [IndexedDataset(tmp_path / "text")], TargetErrorCounts(V, 5, 4))
