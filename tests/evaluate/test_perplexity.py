"""Held-out numbers in the units that they are reported in, each row counted once."""

from __future__ import annotations

from math import log, log2
from pathlib import Path

import numpy as np
import pytest
import torch

from megahead.data.indexed import IndexedDataset
from megahead.data.loader import held_out_collator
from megahead.data.samples import held_out_samples
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.evaluate.perplexity import ValidationResult, ValidationSet
from megahead.losses.softmax import EvaluationSums
from megahead.objectives.micro_batch import EvaluationRequest
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
DECODER = small_config(data={"sequence_length": 8})


def text(folder: Path, text_bytes: int = 0) -> Path:
    """A dataset of 81 tokens out of 50, ten rows of 8 targets."""
    with IndexedDatasetWriter(folder / "text", vocab_size=50) as writer:
        writer.add_document(np.random.default_rng(0).integers(1, 50, 81), text_bytes)
    return folder / "text"


def held_out(prefix: Path, rows: int = 10, micro_size: int = 4, group: Group | None = None) -> ValidationSet:
    samples = held_out_samples(IndexedDataset(prefix), 8)
    return ValidationSet(samples, held_out_collator(DECODER), rows, micro_size, group or Group())


def evenly(request: EvaluationRequest) -> EvaluationSums:
    """A model that finds 32 tokens equally likely each time, and has the right one first at every even target."""
    targets = torch.cat([batch.target_ids_N for batch in request.batches])
    return EvaluationSums(targets.numel() * log(32), int((targets % 2 == 0).sum()), targets.numel(), targets.numel())


@pytest.mark.parametrize("bytes_a_token", [1, 4])
def test_bits_are_of_a_byte_of_text_whatever_a_token_spans(tmp_path: Path, bytes_a_token: int) -> None:
    result = held_out(text(tmp_path, 81 * bytes_a_token)).evaluate(evenly, None, CPU)
    assert result.loss == pytest.approx(log(32))
    assert result.perplexity == pytest.approx(32)
    assert result.bits_per_byte == pytest.approx(log2(32) / bytes_a_token)


def test_bits_per_byte_are_left_out_where_nobody_counted_bytes_or_only_some_tokens_are_predicted(
    tmp_path: Path,
) -> None:
    assert held_out(text(tmp_path)).evaluate(evenly, None, CPU).bits_per_byte is None
    encoder, causal = (
        small_config(
            model={"family": "bert", "token_types": 2, "max_positions": 32, "is_causal": is_causal},
            data={"sequence_length": 16, "end_token": 2},
            masking={"mask_token": 3, "cls_token": 1, "sep_token": 2},
        )
        for is_causal in (False, True)
    )
    samples = held_out_samples(IndexedDataset(text(tmp_path, 81)), encoder.sample_length())
    masked = ValidationSet(samples, held_out_collator(encoder), 5, 4, Group())
    assert masked.evaluate(evenly, None, CPU).bits_per_byte is None
    begun_causally = ValidationSet(samples, held_out_collator(causal), 5, 4, Group())
    assert begun_causally.evaluate(evenly, None, CPU).bits_per_byte == pytest.approx(log2(32))


def test_masked_diffusion_is_an_upper_bound_in_bits_of_all_text_but_for_special_tokens(tmp_path: Path) -> None:
    """A fifth of the tokens end documents, and are given; a target counts by its weight."""
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=50) as writer:
        for _ in range(40):
            writer.add_document([10, 11, 12, 13, 2], 20)
    encoder = small_config(
        model={"family": "bert", "token_types": 2, "max_positions": 32},
        data={"sequence_length": 16, "end_token": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "diffusion": True},
    )
    samples = held_out_samples(IndexedDataset(tmp_path / "text"), encoder.sample_length())
    bound = ValidationSet(samples, held_out_collator(encoder), 12, 4, Group())

    def three_nats(request: EvaluationRequest) -> EvaluationSums:
        weight = sum(batch.total_weight() for batch in request.batches)
        targets = sum(len(batch.target_ids_N) for batch in request.batches)
        return EvaluationSums(3 * weight, targets // 2, targets, weight)

    found = bound.evaluate(three_nats, None, CPU)
    assert found.upper_bound
    assert found.loss == pytest.approx(3)
    assert found.bits_per_byte == pytest.approx(3 / log(2) * 4 / 20)
    assert found.accuracy == pytest.approx(0.5, abs=0.1)
    assert not held_out(text(tmp_path, 81)).evaluate(evenly, None, CPU).upper_bound


@pytest.mark.parametrize("rows", [20, 21, 55])
def test_the_shares_of_masked_diffusion_stay_even_where_rows_are_spread(tmp_path: Path, rows: int) -> None:
    """Also where rows are as far apart as the golden ratio's turns."""
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=50) as writer:
        writer.add_document(np.random.default_rng(0).integers(5, 50, 34 * rows * 99 + 1))
    encoder = small_config(
        model={"family": "bert", "token_types": 2, "max_positions": 128},
        data={"sequence_length": 102, "end_token": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "diffusion": True},
    )
    samples = held_out_samples(IndexedDataset(tmp_path / "text"), encoder.sample_length())
    shares: list[float] = []

    def noted(request: EvaluationRequest) -> EvaluationSums:
        for batch in request.batches:
            shares.extend(torch.bincount(batch.target_index_N // 102, minlength=len(batch.input_ids_BT)) / 100)
        return evenly(request)

    ValidationSet(samples, held_out_collator(encoder), rows, 4, Group()).evaluate(noted, None, CPU)
    expected = (np.arange(rows) + 0.5) / rows
    assert np.abs(np.sort(shares) - expected).max() < 2.5 / rows


def scored(group: Group, prefix: Path, rows: int) -> ValidationResult:
    return held_out(prefix, rows, group=group).evaluate(uneven, None, CPU)


def uneven(request: EvaluationRequest) -> EvaluationSums:
    """Worse at larger ids, so that each row counts differently."""
    targets = torch.cat([batch.target_ids_N for batch in request.batches])
    return EvaluationSums(float(targets.sum()), evenly(request).correct, targets.numel(), targets.numel())


@pytest.mark.parametrize("rows", [3, 99])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_asked_for_counts_once_on_any_number_of_ranks(tmp_path: Path, ranks: int, rows: int) -> None:
    """Three are spread evenly over the ten."""
    prefix = text(tmp_path)
    places = [0, 3, 6] if rows == 3 else [*range(10)]
    targets = IndexedDataset(prefix).read(0, 81)[1:].reshape(10, 8)[places]
    for result in on_ranks(ranks, scored, prefix, rows):
        assert result.loss == pytest.approx(targets.mean())
        assert result.accuracy == pytest.approx((targets % 2 == 0).mean())


def batches_a_request(group: Group, prefix: Path, rows: int) -> list[int]:
    counts: list[int] = []

    def score(request: EvaluationRequest) -> EvaluationSums:
        counts.append(len(request.batches))
        return evenly(request)

    held_out(prefix, rows, 1, group).evaluate(score, None, CPU)
    return counts


@pytest.mark.parametrize(("ranks", "rows", "counts"), [(1, 10, [8, 2]), (2, 9, [4, 1]), (4, 3, [1]), (1, 8, [8])])
def test_several_micro_batches_share_a_pass_over_the_vocabulary(
    tmp_path: Path, ranks: int, rows: int, counts: list[int]
) -> None:
    assert on_ranks(ranks, batches_a_request, text(tmp_path), rows) == [counts] * ranks
