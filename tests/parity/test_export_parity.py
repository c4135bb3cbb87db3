"""Exports speak as their checkpoints do: transformers' probabilities equal `Pretraining`'s own scores.

24 cases in which every two settings of (rotary share, residual, activation, head, stored dtype) meet.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numpy.random import default_rng
from small_checkpoint import save_small, small_config
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from megahead.config import RunConfig
from megahead.convert import export
from megahead.convert.heads import best_head
from megahead.convert.source import TrainedModel
from megahead.data import causal_batch
from megahead.pretraining import Scoring

HEADS = [
    ("none", {}),
    ("tied", {}),
    ("pmi", {}),
    ("pmi", {"temperature": 0.7}),
    ("trained", {"name": "vanilla"}),
    ("trained", {"name": "vanilla", "temperature": 0.5}),
    ("tied", {"name": "vanilla", "tied": True}),
    ("tied", {"name": "vanilla", "tied": True, "temperature": 2.0}),
]
ROTARY = [0.25, 0.5, 1.0]
ACTIVATIONS = ["gelu", "gelu_tanh"]
DTYPES = ["float32", "bfloat16", "float16"]


def cases() -> list[tuple[float, bool, str, tuple[str, dict], str]]:
    pairs = [(head, dtype) for head in range(len(HEADS)) for dtype in range(len(DTYPES))]
    return [
        (ROTARY[(h + d) % 3], (h + d) % 2 == 0, ACTIVATIONS[(h // 2 + d) % 2], HEADS[h], DTYPES[d]) for h, d in pairs
    ]


def random_config(rotary_pct: float, parallel: bool, activation: str, objective: dict) -> RunConfig:
    model = {"rotary_pct": rotary_pct, "parallel_residual": parallel, "activation": activation, "rotary_base": 700.0}
    return small_config(model={**model, "intermediate_size": 100, "norm_eps": 1e-4}, objective=objective)


def test_the_cases_cover_every_pair_of_settings() -> None:
    tried = [(r, p, a, str(head), d) for r, p, a, head, d in cases()]
    values = [sorted({case[i] for case in tried}) for i in range(5)]
    for i in range(5):
        for j in range(i):
            met = {(case[i], case[j]) for case in tried}
            assert len(met) == len(values[i]) * len(values[j]), (i, j)


@pytest.mark.parametrize(("rotary_pct", "parallel", "activation", "head", "dtype"), cases())
def test_probabilities(tmp_path: Path, rotary_pct, parallel, activation, head, dtype) -> None:
    name, objective = head
    save_small(tmp_path / "run", random_config(rotary_pct, parallel, activation, objective))
    report = export(tmp_path / "run", tmp_path / "out", name, dtype=dtype)
    ours = TrainedModel.open(tmp_path / "run")
    rows = default_rng(0).integers(1, 61, (3, 25))
    batch = causal_batch(rows, end_token=0, isolate_documents=False, boundary_targets=True)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 0.2}[dtype]
    with torch.no_grad():
        if name == "none":
            hidden = AutoModel.from_pretrained(report.folder, dtype=torch.float32)(batch.input_ids_BT).last_hidden_state
            torch.testing.assert_close(hidden, ours.load().backbone(batch.input_ids_BT), rtol=tolerance, atol=tolerance)
            return
        logits = AutoModelForCausalLM.from_pretrained(report.folder, dtype=torch.float32)(batch.input_ids_BT).logits
        bias = ours.training_free_bias() if name == "pmi" else None
        scores = ours.load()(Scoring(batch, bias))
    loss = F.cross_entropy(logits.flatten(0, 1), batch.target_ids_N, reduction="sum")
    assert loss.item() / scores.targets == pytest.approx(scores.loss / scores.targets, abs=tolerance)


@pytest.mark.parametrize(
    ("objective", "head"),
    [
        ({"bias": "once", "temperature": 0.7}, "pmi"),
        ({"negatives": 50, "negatives_from": "uniform", "learned_temperature": True}, "pmi"),
        ({"bias": "corrected", "learned_temperature": True}, "tied"),
        ({"vanilla_weight": 0.2}, "trained"),
    ],
    ids=str,
)
def test_every_variant_exports_the_head_it_is_evaluated_with(tmp_path: Path, objective, head) -> None:
    save_small(tmp_path / "run", random_config(0.25, True, "gelu", objective))
    folder = export(tmp_path / "run", tmp_path / "out", head).folder
    ours = TrainedModel.open(tmp_path / "run")
    assert best_head(ours) == head
    batch = causal_batch(
        default_rng(0).integers(1, 61, (3, 25)), end_token=0, isolate_documents=False, boundary_targets=True
    )
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(batch.input_ids_BT).logits
        scores = ours.load()(Scoring(batch, ours.training_free_bias() if head == "pmi" else None))
    loss = F.cross_entropy(logits.flatten(0, 1), batch.target_ids_N, reduction="sum")
    assert loss.item() / scores.targets == pytest.approx(scores.loss / scores.targets, abs=1e-5)
