"""The training-free head of a run, while it trains and from its checkpoint: the formula's, of what was learned from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import held_out_collator
from megahead.data.samples import held_out_samples
from megahead.distributed.group import Group
from megahead.evaluate.perplexity import ValidationSet
from megahead.hf.trained import TrainedModel
from megahead.report.read import read_metrics
from megahead.train.progress import TrainingState
from support.bad_rows import BAD, run_with
from support.long import long
from support.on_ranks import on_ranks
from support.saved import save_checkpoint
from support.small_run import VOCABULARY, small_config, write_text

CPU = torch.device("cpu")
ROWS = 6 * 8
"""Of the steps that were applied and not taken back."""


def bias_of(checkpoint: Checkpoint, objective: dict[str, Any]) -> Tensor:
    """What docs/objective.md says: log q, log pi, or log((N q + M r) / (N + M)), q smoothed by V observations."""
    counts, tokens = (checkpoint.read(f"state/{name}_counts")[:VOCABULARY].double() for name in ("target", "dataset"))
    q = counts + VOCABULARY * (tokens + 1) / (tokens + 1).sum()
    q /= q.sum()
    r = (tokens + 1) / (tokens + 1).sum()
    if objective.get("negatives_from") == "uniform":
        r = torch.full_like(q, 1 / VOCABULARY)
    n, m = checkpoint.state["group_samples"] * float(counts.sum()) / ROWS, objective.get("negatives", 0)
    if objective.get("bias") == "once":
        return (1 - (1 - q) ** n * (1 - r) ** m).log()
    return ((n * q + m * r) / (n + m)).log()


def score(config: RunConfig, model: TrainedModel, bias_V: Tensor) -> float:
    """Held-out loss as an evaluation of the run takes it."""
    assert config.data.validation is not None
    samples = held_out_samples(IndexedDataset(config.data.validation), config.sample_length())
    text = ValidationSet(samples, held_out_collator(config), config.training.evaluate_samples, 2, Group())
    return text.evaluate(model.load(), bias_V.float(), CPU).loss


@pytest.mark.parametrize(
    "objective",
    [
        {},
        long({"bias": "once"}),
        long({"negatives": 30}),
        {"negatives": 30, "negatives_from": "uniform", "bias": "once"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_head_is_the_formulas_though_steps_were_skipped_or_taken_back(
    tmp_path: Path, objective: dict[str, Any], policy: str
) -> None:
    write_text(tmp_path)
    changes = {"faults.bad_step": policy, "training.checkpoint_every": 2, "data.boundary_targets": False}
    config = small_config(tmp_path, changes | {"objective": objective})
    assert on_ranks(2, run_with, config, math.nan, (BAD, BAD + 16)) == ["finished"] * 2
    checkpoint, model = open_checkpoint(tmp_path / "run"), TrainedModel.open(tmp_path / "run")
    assert checkpoint.state["samples"] > ROWS
    expected = bias_of(checkpoint, objective)
    torch.testing.assert_close(model.training_free_bias().double(), expected, atol=1e-5, rtol=1e-5)
    (found,) = read_metrics(tmp_path / "run").validation
    assert found["loss"] == pytest.approx(score(config, model, expected), abs=1e-5)


def test_a_checkpoint_from_before_these_rows_were_counted_has_those_of_its_steps(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"objective": {"bias": "once"}, "faults.bad_step": "rollback"})
    assert on_ranks(1, run_with, config, math.nan) == ["finished"]
    new = open_checkpoint(tmp_path / "run")
    state = {name: value for name, value in new.state.items() if name != "target_samples"}
    tensors = ((name, new.read(name)) for name in new.names())
    old = tmp_path / "old/checkpoints"
    save_checkpoint(old, new.step, tensors, state=state, config=new.config, group=Group())
    assert torch.equal(TrainedModel.open(old).training_free_bias(), TrainedModel.open(new.folder).training_free_bias())
    resumed = TrainingState(config.model.padded_vocab_size(), 2)
    resumed.restore(open_checkpoint(old), Group())
    assert resumed.target_samples == new.state["target_samples"] == ROWS
