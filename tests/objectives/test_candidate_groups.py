"""Candidates shared over ranks and accumulation steps: values and gradients equal one process with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as collectives

from megahead.config.data import DataConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import RowSource
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.objectives.micro_batch import documents_of
from megahead.objectives.pretraining import Pretraining
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.causal_rows import causal_batch
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_engine import small_engine
from support.small_run import small_config, stage, write_text

LENGTH = 12
TOKEN_COUNTS = torch.arange(60)


class Rows(RowSource):
    """Eight rows of random text with documents of all lengths; the last two hold no targets at all."""

    def read(self, indices: range) -> tuple[np.ndarray[Any, Any], None]:
        generator = np.random.default_rng(0)
        tokens = generator.integers(1, 60, (8, LENGTH + 1)) * (generator.random((8, LENGTH + 1)) > 0.3)
        tokens[6:] = 0
        return tokens[np.asarray(indices) % 8], None


def ragged_config(**objective: Any) -> RunConfig:
    changes = {"data.sequence_length": LENGTH, "data.boundary_targets": False, "objective": objective}
    return small_config(Path("nowhere"), changes)


def fed(group: Group, config: RunConfig, group_samples: int, first_sample: int = 0) -> StepBatches:
    objective = build_objective(config.objective, 60, TOKEN_COUNTS)
    channel = group.new_gloo_group()
    loader = StepLoader(Rows(), objective, config.data, config.batch, channel, group_samples=group_samples, seed=3)
    return loader.step(first_sample)


def all_candidates(group: Group, config: RunConfig, group_samples: int) -> list[tuple[Candidates, ...]]:
    return [micro.candidates for micro in fed(group, config, group_samples).micro_batches]


@pytest.mark.parametrize("ranks", [2, long(4)])
@pytest.mark.parametrize(
    "objective", [{}, {"negatives": 9, "bias": "once"}, {"max_candidates": 7, "negatives": 5}], ids=str
)
@pytest.mark.parametrize("group_samples", [1, 2, 4, 8])
def test_candidates_belong_to_the_samples_not_to_the_ranks(
    objective: dict[str, Any], group_samples: int, ranks: int
) -> None:
    config = ragged_config(**objective)
    (expected,) = on_ranks(1, all_candidates, config, group_samples)
    by_rank = on_ranks(ranks, all_candidates, config, group_samples)
    merged = [by_rank[r][k] for k in range(4 // ranks) for r in range(ranks)]
    assert [len(groups) for groups in merged] == [max(1, 2 // group_samples)] * 4
    for ours, theirs in zip(merged, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            for name in ("ids_U", "bias_U", "target_N", "as_target_bias_U"):
                a, b = getattr(mine, name), getattr(other, name)
                assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.parametrize("group_samples", [1, 2, 4, 8])
def test_candidates_belong_to_the_samples_not_to_the_size_of_micro_batches(group_samples: int) -> None:
    """In a later step, where samples' numbers are not their places in the batch."""
    drawn = []
    for micro_size in (1, 2, 4, 8):
        config = ragged_config(negatives=9)
        config = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": micro_size})})
        step = fed(Group(), config, group_samples, first_sample=16)
        groups = [group for micro in step.micro_batches for group in micro.candidates]
        each = max(1, group_samples // micro_size)  # micro-batches of one group have the same candidates
        drawn.append([(group.ids_U.tolist(), group.bias_U.tolist()) for group in groups[::each]])  # type: ignore[union-attr]
    assert [len(groups) for groups in drawn] == [8 // group_samples] * 4
    assert all(groups == drawn[0] for groups in drawn)


def test_a_group_holds_the_targets_of_its_samples_with_their_counts() -> None:
    config = ragged_config()
    (groups,) = on_ranks(1, all_candidates, config, 4)
    data = config.data
    for half, pair in enumerate((groups[:2], groups[2:])):
        batch = whole_batch(data, range(4 * half, 4 * half + 4))
        ids, counts = batch.target_ids_N.unique(return_counts=True)
        for (candidates,) in pair:
            assert candidates.ids_U is not None
            assert candidates.bias_U is not None
            assert torch.equal(candidates.ids_U, ids)
            torch.testing.assert_close(candidates.bias_U.exp(), counts.double())
    assert groups[3][0].target_N.numel() == 0


def whole_batch(data: DataConfig, indices: range = range(8)) -> Batch:
    return causal_batch(Rows().read(indices)[0], end_token=0, isolate_documents=True, boundary_targets=False)


def paper_gradients(config: RunConfig) -> tuple[float, dict[str, Tensor]]:
    """One process, all targets of the global batch at once, N x N scores with duplicates."""
    pretraining, batch = initialized(config), whole_batch(config.data)
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)[batch.target_index_N]
    scores = outputs @ pretraining.backbone.embed(batch.target_ids_N).T
    loss = (scores.logsumexp(dim=1) - scores.diagonal()).mean()
    loss.backward()
    return loss.item(), gradients_of(pretraining)


def gradients_of(pretraining: Pretraining) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pretraining.named_parameters() if p.grad is not None}


def engine_gradients(group: Group, config: RunConfig, stage: int) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and the gradient as Adam's first moment after its first step has it."""
    step = fed(group, config, group_samples=8)
    engine = small_engine(group, stage, accumulation=len(step.micro_batches), clipping=0.0, module=initialized(config))
    losses = [engine.micro_step(micro) for micro in step.micro_batches]
    engine.step(0.0)
    moments = {name: t.clone() / 0.1 for name, t in engine.tensors() if name.startswith("exp_avg/")}
    return float(group.all_reduce_(torch.stack(losses).mean())) / group.size, moments


@pytest.mark.parametrize("ranks", [1, 2, long(4)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_equal_one_process_with_the_same_candidates(stage: int, ranks: int) -> None:
    config = ragged_config()
    loss, expected = paper_gradients(config)
    for rank_loss, gradients in on_ranks(ranks, engine_gradients, config, stage):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[f"exp_avg/{name}"], gradient, rtol=1e-4, atol=1e-6)


def classic(group: Group, config: RunConfig) -> dict[str, Tensor]:
    """The usual way: embeddings of the targets gathered from all ranks, gradients flowing back through the gather."""
    pretraining = initialized(config)
    share = 8 // group.size
    batch = whole_batch(config.data, range(group.rank * share, (group.rank + 1) * share))
    sizes = group.all_gather(torch.tensor(batch.target_ids_N.numel()))
    own_rows, start = pretraining.backbone.embed(batch.target_ids_N), int(sizes[: group.rank].sum())
    padded = torch.nn.functional.pad(own_rows, (0, 0, 0, int(sizes.max()) - len(own_rows)))
    gathered = collectives.all_gather(padded)
    rows = torch.cat([part[:size] for part, size in zip(gathered, sizes.tolist(), strict=True)])
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)[batch.target_index_N]
    scores = outputs @ rows.T
    own = scores.diagonal(offset=start)[: len(outputs)]
    ((scores.logsumexp(dim=1) - own).sum() / sizes.sum()).backward()
    return {name: group.all_reduce_(gradient) for name, gradient in gradients_of(pretraining).items()}


def ids_only(group: Group, config: RunConfig) -> dict[str, Tensor]:
    pretraining = initialized(config)
    step = fed(group, config, group_samples=8)
    for micro in step.micro_batches:
        (pretraining(micro) / group.size / len(step.micro_batches)).backward()
    return {name: group.all_reduce_(gradient) for name, gradient in gradients_of(pretraining).items()}


def test_exchanging_ids_equals_exchanging_embeddings_with_gradients() -> None:
    config = ragged_config()
    for by_rows, by_ids in zip(on_ranks(4, classic, config), on_ranks(4, ids_only, config), strict=True):
        assert by_rows.keys() == by_ids.keys()
        for name, gradient in by_rows.items():
            torch.testing.assert_close(by_ids[name], gradient, rtol=1e-4, atol=1e-7)


def bytes_sent(group: Group, config: RunConfig, way: str) -> int:
    """Bytes that this rank sends to the other one in a step for the sake of shared candidates."""
    sent: list[int] = []
    gather, scatter = dist.all_gather, dist.scatter

    def counted_gather(parts: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return gather(parts, tensor, **options)

    def counted_scatter(part: Tensor, parts: list[Tensor] | None, *rest: Any, **options: Any) -> Any:
        sent.append(part.numel() * part.element_size() if parts else 0)  # how gradients of a gather travel over gloo
        return scatter(part, parts, *rest, **options)

    dist.all_gather, dist.scatter = counted_gather, counted_scatter
    ids_only(group, config) if way == "ids" else classic(group, config)
    return sum(sent)


def test_ids_are_a_fraction_of_the_bytes_of_embeddings() -> None:
    config = ragged_config()
    ids, rows = (on_ranks(2, bytes_sent, config, way)[0] for way in ("ids", "embeddings"))
    most_targets = whole_batch(config.data, range(4)).target_ids_N.numel()
    assert ids <= 4 * 4 * LENGTH * 2 + 2 * 8  # at most 4 bytes a target of this rank's rows, and their counts
    assert rows >= 2 * most_targets * 32 * 4  # hidden size 32 in fp32, there and back
    assert rows > 40 * ids


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


EVERYTHING = {
    "negatives": 40,
    "max_candidates": 30,
    "bias": "corrected",
    "learned_temperature": True,
    "vanilla_weight": 0.3,
}


@pytest.mark.parametrize(
    ("objective", "zero"),
    [({}, 1), long(EVERYTHING, 0), (EVERYTHING, 3)],
    ids=["paper", "everything", "everything cut up"],
)
def test_global_groups_reproduce_one_process_step_by_step(tmp_path: Path, objective: dict[str, Any], zero: int) -> None:
    write_text(tmp_path)
    common = {"objective": {"group_samples": "global_batch", **objective}, "batch.global_size": 64}
    common |= {"training.checkpoint_every": 6}
    common |= {"data.boundary_targets": False}
    one = {"batch.micro_size": 64, "output_dir": str(tmp_path / "one")}
    two = {"batch.micro_size": 16, "output_dir": str(tmp_path / "two")}
    on_ranks(1, run, small_config(tmp_path, common | one))
    on_ranks(2, run, small_config(tmp_path, common | two | stage(zero)))
    ours, theirs = (read_metrics(tmp_path / name) for name in ("two", "one"))
    assert len(ours.training) == 6
    for name in ("loss", "gradient_norm"):
        curve = [record[name] for record in theirs.training]
        assert [record[name] for record in ours.training] == pytest.approx(curve, abs=1e-5, rel=1e-5)
    assert ours.validation[-1]["loss"] == pytest.approx(theirs.validation[-1]["loss"], abs=1e-5)


def test_a_resumed_run_keeps_its_groups_on_another_mesh(tmp_path: Path) -> None:
    write_text(tmp_path)
    common = {"objective.group_samples": "data_parallel"}
    on_ranks(2, run, small_config(tmp_path, common))
    resumed = small_config(tmp_path, common | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(1, run, resumed, str(tmp_path / "run/checkpoints/step-00000003"))  # where data_parallel alone is 2 rows
    mine, theirs = (read_metrics(tmp_path / name).training for name in ("resumed", "run"))
    for name in ("loss", "candidates"):
        assert [record[name] for record in mine] == pytest.approx([r[name] for r in theirs[3:]], abs=1e-5)
