"""Masking rare tokens more often: the head that needs no training speaks of text as it is, not as it was masked.

The contrastive optimum is known in closed form where a row's tokens are drawn alike from its context: log p(v | c) / q,
both as the collator drew them. Held-out rows are masked alike, whatever a run trains with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megahead.config.run import RunConfig
from megahead.data.batch import EncoderRowBuilder
from megahead.data.loader import held_out_collator
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import Frequency
from megahead.hf.trained import TrainedModel
from megahead.losses.candidates import evaluation_target_counts, log_unigram, training_free_bias
from support.small_checkpoint import save_small, small_config

VOCABULARY, CONTEXTS, LENGTH, FIRST = 120, 8, 62, 4
IDS = {"mask_token": 3, "cls_token": 1, "sep_token": 2}


def config_of(**masking: Any) -> RunConfig:
    return small_config(
        model={"family": "bert", "max_positions": LENGTH + 2, "vocab_size": VOCABULARY},
        data={"end_token": 2, "isolate_documents": False},
        masking={**IDS, "strategy": "frequency", **masking},
    )


def contexts() -> np.ndarray:
    """[K, V]: p(v | c), tilts of a Zipf law; nothing for special tokens."""
    tilt = 1.5 * np.random.default_rng(0).standard_normal((CONTEXTS, VOCABULARY - FIRST))
    weights = np.exp(tilt) / (np.arange(VOCABULARY - FIRST) + 2)
    return np.pad(weights / weights.sum(1, keepdims=True), ((0, 0), (FIRST, 0)))


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(context of each row, its tokens)."""
    generator = np.random.default_rng(seed)
    context_B = generator.integers(CONTEXTS, size=count)
    edges = contexts().cumsum(1)
    edges[:, -1] = 1.0
    draws = generator.random((count, LENGTH))
    return context_B, np.stack(
        [np.searchsorted(edges[c], draw, "right") for c, draw in zip(context_B, draws, strict=True)]
    )


def targets(collator: MaskingCollator, context_B: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(context, token) of each target."""
    batch = collator.batch(text, range(len(text)))
    return context_B[batch.target_index_N.numpy() // (LENGTH + 2)], batch.target_ids_N.numpy()


@pytest.mark.parametrize("count", ["fixed", "bernoulli"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_held_out_text_is_predicted_as_it_is(count: str, power: float) -> None:
    config = config_of(count=count, frequency_power=power)
    assert config.masking is not None
    context_B, text = rows(12_000, seed=1)
    token_counts = np.bincount(text.ravel(), minlength=VOCABULARY)
    strategy = Frequency.build(config.masking, SimpleNamespace(token_counts=lambda: token_counts))
    seen_N, target_N = targets(
        MaskingCollator(EncoderRowBuilder(config.masking, 2, False), strategy, VOCABULARY, 0), context_B, text
    )
    joint = np.zeros((CONTEXTS, VOCABULARY))
    np.add.at(joint, (seen_N, target_N), 1)
    target_counts = torch.from_numpy(joint.sum(0)).long()
    scores = np.log((joint + 1e-3) / joint.sum(1, keepdims=True)) - log_unigram(target_counts, VOCABULARY).numpy()

    held_out = held_out_collator(config)
    assert held_out is not None
    asked_N, truth_N = targets(held_out, *rows(2_000, seed=2))

    def perplexity(asked: torch.Tensor | None) -> float:
        bias = training_free_bias(config.objective, VOCABULARY, target_counts, None, 100.0, asked)
        assert bias is not None
        logits = torch.from_numpy(scores + bias.numpy())
        return float(np.exp(-logits.log_softmax(1).numpy()[asked_N, truth_N].mean()))

    best = float(np.exp(-np.log(contexts()[asked_N, truth_N]).mean()))
    asked = evaluation_target_counts(config, torch.from_numpy(token_counts))
    assert perplexity(asked) < 1.04 * best
    assert perplexity(None) > 1.15 * best  # as the masked targets are distributed


@pytest.mark.parametrize("strategy", ["frequency", "informative", "hardest"])
def test_an_exported_head_speaks_of_text_as_it_is(tmp_path, strategy: str) -> None:
    """Its bias comes from the counts of the text beside the targets', special tokens left out."""
    config = config_of(strategy=strategy)
    save_small(tmp_path / "run", config, counts=torch.arange(128) * 10)
    found = TrainedModel.open(tmp_path / "run").training_free_bias()
    expected = torch.arange(128) * 10
    expected[[1, 2, 3]] = 0
    torch.testing.assert_close(found, log_unigram(expected, VOCABULARY))


def test_where_all_tokens_are_masked_alike_nothing_else_is_asked_for() -> None:
    counts = torch.arange(VOCABULARY)
    assert evaluation_target_counts(config_of(strategy="uniform"), counts) is None
    assert evaluation_target_counts(config_of(), None) is None
    assert evaluation_target_counts(small_config(), counts) is None
