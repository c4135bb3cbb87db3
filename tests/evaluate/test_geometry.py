"""What a head lets through, and the spread of outputs and rows, against their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader, held_out_collator
from megahead.data.samples import EvenlySpacedSamples, held_out_samples
from megahead.errors import FieldError
from megahead.evaluate.geometry import _VectorStatistics, measure_geometry
from megahead.hf.trained import TrainedModel
from megahead.objectives.micro_batch import documents_of, target_positions_of
from support.small_checkpoint import save_small
from support.small_run import VOCABULARY, small_config, write_text

NARROW = {"model__hidden_size": 16, "model__num_heads": 2}
"""Fewer features than candidates, so that some gradient is lost."""

REPLACED_TOKENS = {
    "model__family": "bert",
    "model__vocab_size": 63,
    "model__hidden_size": 8,
    "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62},
    "batch__micro_size": 8,
    "objective__replaced_tokens": {"generator_layers": 1},
}
"""An encoder whose generator learns the targets."""


def saved(folder: Path, **changes: object) -> Path:
    """A checkpoint of random weights whose run has held-out text."""
    write_text(folder)
    config = small_config(folder, {name.replace("__", "."): value for name, value in changes.items()})
    return save_small(folder / "run", config, group_samples=config.batch.micro_size)


def by_definition(checkpoint: Path, rows: int) -> tuple[float, float, float]:
    """Gradient's share by autograd and a projection, rank by singular values, anisotropy by all pairs of outputs."""
    model = TrainedModel.open(checkpoint)
    config, pretraining = model.config, model.load().double()
    text = held_out_samples(IndexedDataset(str(config.data.validation)), config.sample_length())
    samples = EvenlySpacedSamples(text, rows)
    reaching = whole = 0.0
    outputs = []
    for first in range(0, rows, config.batch.micro_size):
        group = range(first, min(first + config.batch.micro_size, rows))
        batch = BatchReader(samples, held_out_collator(config)).read(group)
        inputs, predictor = pretraining.backbone.embed(batch.input_ids_BT), pretraining.backbones()[-1]
        hidden = predictor.encode_at(inputs, documents_of(batch), target_positions_of(batch)).detach()
        embedding = pretraining.backbone.embedding if config.objective.candidates == "input" else pretraining.head
        table, targets = embedding.weight.detach()[: config.model.vocab_size], batch.target_ids_N
        if config.objective.name == "headless":
            ids, targets, counts = targets.unique(return_inverse=True, return_counts=True)
            table, bias = table[ids], counts.double().log()
        else:
            bias = torch.zeros(len(table), dtype=torch.float64)
        scores = (hidden @ table.T / model.temperature() + bias).requires_grad_()
        torch.nn.functional.cross_entropy(scores, targets, reduction="sum").backward()
        assert scores.grad is not None
        projected = scores.grad @ (table @ torch.linalg.pinv(table))
        reaching, whole = reaching + projected.square().sum().item(), whole + scores.grad.square().sum().item()
        outputs.append(hidden)
    hidden = torch.cat(outputs)
    shares = torch.linalg.svdvals(hidden)
    shares = shares / shares.sum()
    directions = hidden / hidden.norm(dim=1, keepdim=True)
    cosines = (directions @ directions.T)[~torch.eye(len(hidden), dtype=torch.bool)]
    return reaching / whole, (-shares * shares.log()).sum().exp().item(), cosines.mean().item()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective__name": "vanilla", "objective__tied": True},
        {"objective__temperature": 0.7},
        {"objective__vanilla_weight": 0.3},
        {"objective__candidates": "own"},
        REPLACED_TOKENS,
    ],
    ids=["headless", "vanilla", "cooler", "mixed", "own", "replaced tokens"],
)
def test_geometry_is_what_its_definitions_say(tmp_path: Path, changes: dict[str, object]) -> None:
    checkpoint = saved(tmp_path, **NARROW | changes)
    found = measure_geometry(checkpoint, rows=5)
    share, rank, anisotropy = by_definition(checkpoint, rows=5)
    assert found.gradient_share == pytest.approx(share, rel=1e-4)
    assert 0.1 < share < 0.99
    assert found.output_rank == pytest.approx(rank, rel=1e-4)
    assert found.output_anisotropy == pytest.approx(anisotropy, abs=1e-5)


def test_all_of_the_gradient_comes_through_rows_of_full_rank(tmp_path: Path) -> None:
    """As many features as candidates: nothing can be lost."""
    found = measure_geometry(saved(tmp_path, model__hidden_size=64), rows=4)
    assert found.gradient_share == pytest.approx(1, abs=1e-3)


def test_the_embedding_is_measured_without_its_padding(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    table = TrainedModel.open(checkpoint).weight("backbone.embedding.weight")
    assert len(table) > VOCABULARY
    found, alone = measure_geometry(checkpoint, rows=2), _VectorStatistics([table[:20], table[20:VOCABULARY]])
    assert (found.embedding_rank, found.embedding_anisotropy) == pytest.approx((alone.rank(), alone.anisotropy()))


@pytest.mark.parametrize(("vectors", "rank", "anisotropy"), [(torch.eye(7), 7, 0), (torch.ones(5, 3), 1, 1)])
def test_even_directions_and_a_single_one(vectors: torch.Tensor, rank: float, anisotropy: float) -> None:
    spread = _VectorStatistics([vectors])
    assert spread.rank() == pytest.approx(rank, rel=1e-5)
    assert spread.anisotropy() == pytest.approx(anisotropy, abs=1e-6)


def test_a_run_without_held_out_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"data\.validation"):
        measure_geometry(saved(tmp_path, data__validation=None))


def test_a_score_that_is_no_product_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"`objective.score` must be dot .* but is cosine instead"):
        measure_geometry(saved(tmp_path, objective__score="cosine"))
