"""Candidates of an estimate are those of the groups: on a text that repeats no id, as many as the loader has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megahead import estimate
from megahead.commands.estimate import parameter_lines
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.data.samples import RowSource
from megahead.distributed.group import Group
from megahead.estimate import candidate_rows, rank_memory, run_flops
from megahead.losses.contrastive import build_objective
from megahead.objectives.loader import StepBatches, StepLoader
from support.on_ranks import on_ranks
from support.small_run import small_config

LENGTH, VOCABULARY = 12, 100_000
GROUPS = ("micro_batch", "data_parallel", "global_batch", 1, 4, 8)


@pytest.fixture(autouse=True)
def every_token_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate's law of unique ids, in place of that of English."""
    monkeypatch.setattr(estimate, "expected_candidates", min)


class Rows(RowSource):
    """Rows that share no id."""

    def read(self, indices: range) -> tuple[np.ndarray[Any, Any], None]:
        return 1 + np.asarray(indices)[:, None] * (LENGTH + 1) + np.arange(LENGTH + 1), None


def config_of(micro_size: int = 2, changes: dict[str, Any] | None = None, **objective: Any) -> RunConfig:
    sizes = {"model.vocab_size": VOCABULARY, "data.sequence_length": LENGTH, "batch.micro_size": micro_size}
    return small_config(Path("nowhere"), sizes | {"objective": objective} | (changes or {}))


def loaded(ranks: Group, config: RunConfig, samples: int) -> tuple[float, int]:
    """Candidates of an output, and distinct ids that the rank looks up in a step."""
    objective = build_objective(config.objective, VOCABULARY, torch.ones(VOCABULARY, dtype=torch.int64))
    group = ranks.new_gloo_group()
    loader = StepLoader(Rows(), objective, config.data, config.batch, group, group_samples=samples)
    batches: StepBatches = loader.step(0)
    ids = torch.cat([micro.ids() for micro in batches.micro_batches])
    return batches.candidates, len(ids.unique())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("samples", GROUPS)
def test_an_estimate_has_the_candidates_of_a_group(samples: int | str, ranks: int) -> None:
    config = config_of(group_samples=samples)
    plan = RunPlan.of(config, ranks)
    for candidates, ids in on_ranks(ranks, loaded, config, plan.group_samples()):
        assert candidate_rows(config, ranks) == candidates
        assert estimate._ids_of_step(plan) == pytest.approx(ids, rel=0.1)  # a row reads an id that is no target


@pytest.mark.parametrize(
    "changes", [{"negatives": 50}, {"negatives": 50, "negatives_from": "uniform"}, {"max_candidates": 20}], ids=str
)
def test_drawn_ids_and_a_cap_are_in_it(changes: dict[str, Any]) -> None:
    config, plain = config_of(group_samples=8, **changes), config_of(group_samples=8)
    (candidates, _), rows = loaded(Group(), config, 8), candidate_rows(config)
    assert rows == pytest.approx(candidates, rel=0.15)
    assert rows >= candidates
    assert rows != candidate_rows(plain)


TEXTS: dict[str, Any] = {
    "model.family": "bert",
    "masking": {"mask_token": 3, "cls_token": 1, "sep_token": 2},
    "data.end_token": 2,
    "objective.retromae": {},
}
"""An encoder with a decoder of texts, whose own targets are a group's, too."""


@pytest.mark.parametrize("changes", [{}, TEXTS], ids=["tokens", "texts"])
@pytest.mark.parametrize("samples", ["global_batch", 1, 4, 8])
def test_operations_are_those_of_the_objective_not_of_the_memory(samples: int | str, changes: dict[str, Any]) -> None:
    """A smaller micro-batch with the same groups scores as much."""
    flops = []
    for micro_size in (1, 4):
        config = config_of(micro_size, changes, group_samples=samples)
        flops.append(run_flops(config, candidate_rows(config)))
    assert flops[0] == flops[1]


def test_memory_of_the_loss_has_the_rows_of_each_group() -> None:
    one, two = (rank_memory(RunPlan.of(config_of(size, group_samples=2), 1, "cuda")).loss for size in (2, 4))
    wide = rank_memory(RunPlan.of(config_of(4, group_samples=4), 1, "cuda")).loss
    assert one < two < 2 * one  # scores of one group at a time
    assert wide > two
    assert parameter_lines(RunPlan.of(config_of(group_samples=8), 1)) != parameter_lines(RunPlan.of(config_of(), 1))
