"""Exports speak as their checkpoints are evaluated: transformers' probabilities equal `Pretraining`'s own scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numpy.random import default_rng
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megahead.hf.export import export
from megahead.hf.heads import best_head
from megahead.hf.trained import TrainedModel
from megahead.objectives.micro_batch import EvaluationRequest
from support.causal_rows import causal_batch
from support.small_checkpoint import save_small, small_config


@pytest.mark.parametrize("padding", ["trimmed", "kept"])
@pytest.mark.parametrize(
    ("objective", "head"),
    [
        ({"temperature": 0.7}, "pmi"),
        ({"name": "vanilla"}, "trained"),
        ({"name": "vanilla", "tied": True, "temperature": 2.0}, "trained"),
        ({"bias": "once", "temperature": 0.7}, "pmi"),
        ({"negatives": 50, "negatives_from": "uniform", "learned_temperature": True}, "pmi"),
        ({"bias": "corrected", "learned_temperature": True}, "tied"),
        ({"vanilla_weight": 0.2}, "trained"),
        ({"candidates": "own", "temperature": 0.7}, "pmi"),
        ({"candidates": "own", "bias": "corrected"}, "trained"),
    ],
    ids=str,
)
def test_every_variant_exports_the_head_it_is_evaluated_with(tmp_path: Path, objective, head, padding: str) -> None:
    """With 195 rows of padding, too, which would take most of the probability if they could."""
    model = {"vocab_multiple": 256 if padding == "kept" else 16}
    save_small(tmp_path / "run", small_config(objective=objective, model=model))
    folder = export(tmp_path / "run", tmp_path / "out", head, keep_padding=padding == "kept").folder
    ours = TrainedModel.open(tmp_path / "run")
    assert best_head(ours) == head
    batch = causal_batch(
        default_rng(0).integers(1, 61, (3, 25)), end_token=0, isolate_documents=False, boundary_targets=True
    )
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(batch.input_ids_BT).logits
        scores = ours.load()(EvaluationRequest((batch,), ours.training_free_bias() if head == "pmi" else None))
    assert logits.shape[-1] == (256 if padding == "kept" else 61)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.target_ids_N, reduction="sum")
    assert loss.item() / scores.targets == pytest.approx(scores.loss / scores.targets, abs=1e-5)
