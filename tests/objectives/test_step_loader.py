"""Global batches cut into micro-batches: the same samples on any number of ranks, prepared ahead in order."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import training_collator, training_samples
from megahead.data.samples import ConcatenatedSamples, RowSource
from megahead.data.strategy import TargetErrorCounts
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.objectives.auxiliary import Auxiliary, Targets
from megahead.objectives.loader import StepLoader, mean_candidates, prefetch
from megahead.objectives.micro_batch import MicroBatch
from support.on_ranks import on_ranks
from support.small_run import VOCABULARY, small_config, write_text


def fed(group: Group, config: RunConfig) -> list[tuple[list[list[int]], int, float]]:
    """(inputs of each micro-batch, global targets, loss scale) of three steps."""
    datasets = [IndexedDataset(part.prefix) for part in config.data.parts()]
    samples = training_samples(config.data, datasets, config.seed, config.sample_length())
    collator = training_collator(config, datasets)
    rule = build_objective(config.objective, 60)
    loader = StepLoader(samples, rule, config.data, config.batch, group.new_gloo_group(), collator=collator)
    steps = loader.steps(first_sample=16)
    return [
        (
            [micro.batch.input_ids_BT.flatten().tolist() for micro in step.micro_batches],
            step.targets,
            step.micro_batches[0].loss_weight,
        )
        for step, _ in zip(steps, range(3), strict=False)
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_are_cut_in_rank_order_and_targets_counted_once(
    tmp_path: Path, ranks: int, prefetch: int
) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"data.prefetch": prefetch, "data.boundary_targets": False})
    (reference,) = on_ranks(1, fed, config)
    parts = on_ranks(ranks, fed, config)
    for step in range(3):
        micro_batches, targets, scale = reference[step]
        assert 0 < targets < 8 * 24  # end tokens have no targets here
        assert scale == pytest.approx(4 / targets)  # one rank, four accumulation steps
        merged = [parts[r][step][0][k] for k in range(4 // ranks) for r in range(ranks)]
        assert merged == micro_batches
        for rank in range(ranks):
            assert parts[rank][step][1] == targets
            assert parts[rank][step][2] == pytest.approx(4 / targets)


@pytest.mark.parametrize("reads", ["blend", "best_fit", "stored", "masked"])
def test_every_way_of_reading_gives_the_same_samples_on_more_ranks_and_smaller_micro_batches(
    tmp_path: Path, reads: str
) -> None:
    other = write_text(tmp_path, name="other", documents=40, seed=1)
    rows = np.random.default_rng(0).integers(1, VOCABULARY, (50, 25))
    with IndexedDatasetWriter(tmp_path / "rows", vocab_size=VOCABULARY) as writer:
        writer.add_documents(rows.reshape(-1), np.full(50, 25), sequences=np.empty(0, np.int64))
    changes: dict[str, object] = {
        "blend": {"data.train": [{"prefix": write_text(tmp_path), "weight": 3}, {"prefix": other, "weight": 1}]},
        "best_fit": {"data.train": other, "data.pack": "best_fit"},
        "stored": {"data.train": str(tmp_path / "rows"), "data.order": "stored"},
        "masked": {"data.train": other, "model.vocab_size": 61, "masked_inputs": {"mask_token": 60}},
    }[reads]
    (reference,) = on_ranks(1, fed, small_config(tmp_path, changes))
    parts = on_ranks(2, fed, small_config(tmp_path, {**changes, "batch.micro_size": 1}))
    for step in range(3):
        whole = [token for micro in reference[step][0] for token in micro]
        assert [token for k in range(4) for r in range(2) for token in parts[r][step][0][k]] == whole
        assert parts[0][step][1] == parts[1][step][1] == reference[step][1]


class Numbered(RowSource):
    """Rows of their own numbers."""

    def read(self, indices: range) -> tuple[np.ndarray[Any, Any], None]:
        return np.repeat(np.asarray(indices)[:, None], 25, axis=1), None


def test_steps_read_every_sample_once_and_in_order_from_the_first_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"data.isolate_documents": False})
    loader = StepLoader(Numbered(), build_objective(config.objective, VOCABULARY), config.data, config.batch, Group())  # type: ignore[arg-type]
    steps = [step for step, _ in zip(loader.steps(first_sample=16), range(2), strict=False)]
    read = [number for step in steps for micro in step.micro_batches for number in micro.batch.input_ids_BT[:, 0]]
    assert read == list(range(16, 32))


class SameText(RowSource):
    """Rows that are all alike, whatever their numbers."""

    def read(self, indices: range) -> tuple[np.ndarray[Any, Any], None]:
        return np.tile(np.arange(1, 26), (len(indices), 1)), None


@pytest.mark.parametrize("group_samples", [1, 4, 8])
@pytest.mark.parametrize("objective", [{"negatives": 40, "negatives_from": "uniform"}, {"max_candidates": 12}], ids=str)
def test_the_same_text_meets_other_candidates_in_every_group_and_step_and_run(
    tmp_path: Path, objective: dict[str, Any], group_samples: int
) -> None:
    config = small_config(tmp_path, {"objective": objective})
    rule = build_objective(config.objective, VOCABULARY)

    def drawn(seed: int) -> set[tuple[float, ...]]:
        loader = StepLoader(
            SameText(), rule, config.data, config.batch, Group(), group_samples=group_samples, seed=seed
        )  # type: ignore[arg-type]
        micro_batches = [micro for step in (0, 8, 16) for micro in loader.step(step).micro_batches]
        groups = [group for micro in micro_batches for group in micro.candidates]
        return {(*group.ids_U.tolist(), *group.bias_U.tolist()) for group in groups}  # type: ignore[union-attr]

    assert drawn(0) == drawn(0)
    assert len(drawn(0) | drawn(1)) == 2 * 3 * 8 // group_samples


def test_preparing_ahead_depends_on_what_was_taken_and_nothing_else() -> None:
    prepared: list[int] = []

    def prepare(key: int) -> int:
        prepared.append(key)
        return key * key

    stream = prefetch(prepare, iter(range(100)), depth=2)
    assert [next(stream) for _ in range(3)] == [0, 1, 4]
    stream.close()
    assert prepared == [0, 1, 2, 3, 4]


def test_it_prepares_one_after_the_other_and_nothing_ahead_when_told_so() -> None:
    at_work = threading.Lock()

    def prepare(key: int) -> str:
        assert at_work.acquire(blocking=False)
        time.sleep(0.005)
        at_work.release()
        return threading.current_thread().name

    assert len(list(prefetch(prepare, range(6), depth=3))) == 6
    assert set(prefetch(prepare, range(3), depth=0)) == {threading.current_thread().name}


def test_it_prepares_in_another_thread_and_hands_on_errors() -> None:
    def prepare(key: int) -> str:
        if key == 1:
            raise RuntimeError("broken row")
        return threading.current_thread().name

    stream = prefetch(prepare, [0, 1], depth=1)
    assert next(stream).startswith("prefetch")
    with pytest.raises(RuntimeError, match="broken row"):
        next(stream)


READ_BY_INDEX = {"index", "index_select", "gather", "searchsorted"}


class LargestPass(TorchDispatchMode):
    """Numbers in the largest tensor that an operation made or went through."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = [result] if func.overloadpacket.__name__ in READ_BY_INDEX else [result, args]
        if not func.is_view:
            self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(touched) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": {"bias": "corrected", "negatives": 50, "group_samples": 4}},
        {"objective": {"max_candidates": 40}},
        {"objective": {"name": "vanilla"}},
        {
            "model.family": "bert",
            "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "strategy": "hardest"},
        },
    ],
    ids=str,
)
def test_preparing_a_step_is_no_pass_over_the_vocabulary(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A million ids would take 84 ms for each micro-batch, more than a small model's step on a GPU."""
    vocabulary = 2**20
    write_text(tmp_path)
    config = small_config(tmp_path, {"model.vocab_size": vocabulary} | changes)
    text = IndexedDataset(config.data.train)
    target_error_counts = TargetErrorCounts(config.model.padded_vocab_size(), period_steps=1000, samples_per_step=8)
    collator = training_collator(config, [text], target_error_counts)
    rule = build_objective(config.objective, vocabulary, torch.ones(vocabulary, dtype=torch.int64))
    reading = ConcatenatedSamples(text, config.sample_length(), config.seed), rule, config.data, config.batch, Group()
    loader = StepLoader(
        *reading, group_samples=resolve_candidate_group_samples(config.objective, config.batch, 1), collator=collator
    )
    loader.step(0)
    tracemalloc.start()
    try:
        with LargestPass() as largest:
            loader.step(8)
        of_numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < largest.numbers < vocabulary / 100
    assert of_numpy < vocabulary


class FewTargets(RowSource):
    """Rows of which only the first, the sample 0, holds as many targets as asked for: all else is end tokens."""

    def __init__(self, targets: int) -> None:
        self.targets = targets

    def read(self, indices: range) -> tuple[np.ndarray[Any, Any], None]:
        rows = np.zeros((len(indices), 25), np.int64)
        if 0 in indices:
            rows[indices.index(0), : self.targets] = 7
        return rows, None


@pytest.mark.parametrize("targets", [0, 1, 2])
def test_a_step_of_hardly_any_targets_is_averaged_over_those_and_may_have_none(tmp_path: Path, targets: int) -> None:
    config = small_config(tmp_path, {"objective.name": "vanilla", "data.boundary_targets": False})
    rule = build_objective(config.objective, VOCABULARY)
    step = StepLoader(FewTargets(targets), rule, config.data, config.batch, Group()).step(0)  # type: ignore[arg-type]
    assert step.targets == targets
    assert {micro.loss_weight for micro in step.micro_batches} == {4 / max(targets, 1)}
    assert step.candidates == 0  # the whole vocabulary


class OfTexts(Auxiliary):
    """A mean over texts of what an objective predicts of its own targets."""

    @classmethod
    def targets(cls, batch: Batch) -> Targets:
        return Targets(batch.target_index_N[::3], batch.target_ids_N[::3])

    @classmethod
    def num_loss_terms(cls, batch: Batch) -> int:
        return len(batch.input_ids_BT)


@pytest.mark.parametrize("group_samples", [2, 4, 8])
def test_own_targets_have_their_candidates_whatever_their_loss_is_a_mean_over(
    tmp_path: Path, group_samples: int
) -> None:
    config = small_config(tmp_path, {"batch.micro_size": 2})
    step = StepLoader(
        Numbered(), build_objective(config.objective, VOCABULARY), config.data, config.batch, Group(),
        group_samples=group_samples, auxiliary=OfTexts,
    ).step(0)  # type: ignore[arg-type] # fmt: skip
    for first in range(0, len(step.micro_batches), group_samples // 2):
        micro_batches = step.micro_batches[first : first + group_samples // 2]
        ids = torch.cat([OfTexts.targets(micro.batch).ids_P for micro in micro_batches])
        for micro in micro_batches:
            (candidates,) = micro.auxiliary_candidates
            assert candidates.ids_U is not None
            assert candidates.ids_U.tolist() == ids.unique().tolist()
            assert torch.equal(candidates.ids_U[candidates.target_N], OfTexts.targets(micro.batch).ids_P)
    assert {micro.auxiliary_weight for micro in step.micro_batches} == {len(step.micro_batches) / 8}


@pytest.mark.parametrize("group_samples", [1, 2, 4])
def test_weighed_targets_are_averaged_by_their_weights_and_keep_them_in_any_group(
    tmp_path: Path, group_samples: int
) -> None:
    """In masked diffusion a row counts as often as it has tokens, however many of them are masked."""
    masks = {"mask_token": 60, "cls_token": 61, "sep_token": 62, "diffusion": True}
    write_text(tmp_path)
    config = small_config(tmp_path, {"model.family": "bert", "model.vocab_size": 63, "masking": masks})
    text = IndexedDataset(config.data.train)
    samples, rule = (
        ConcatenatedSamples(text, config.sample_length(), config.seed),
        build_objective(config.objective, 63),
    )
    options = {"group_samples": group_samples, "collator": training_collator(config, [text])}
    step = StepLoader(samples, rule, config.data, config.batch, Group(), **options).step(0)  # type: ignore[arg-type]
    tokens = int((samples.read(range(8))[0] != 0).sum())
    assert [micro.loss_weight for micro in step.micro_batches] == pytest.approx([4 / tokens] * 4)
    assert step.targets == sum(len(micro.batch.target_ids_N) for micro in step.micro_batches) != tokens
    for micro in step.micro_batches:
        weights = [group.weight_N for group in micro.candidates if group.weight_N is not None]
        assert [len(part) for part in weights] == [len(group.target_N) for group in micro.candidates]
        assert torch.equal(torch.cat(weights), micro.batch.weight_N)  # type: ignore[arg-type]


def test_candidates_are_counted_on_average_over_groups() -> None:
    batch = Batch(torch.zeros(1, 4, dtype=torch.int64), None, torch.arange(3), torch.arange(3))
    one, two, all_ids = (Candidates(ids, None, torch.arange(3)) for ids in (torch.arange(3), torch.arange(4), None))
    assert mean_candidates([MicroBatch(batch, (one, two), 1.0), MicroBatch(batch, (two,), 1.0)]) == 11 / 3
    assert mean_candidates([MicroBatch(batch, (all_ids,), 1.0)]) == 0


def test_targets_are_what_was_counted(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    samples = ConcatenatedSamples(IndexedDataset(config.data.train), 24, config.seed)
    step = StepLoader(samples, build_objective(config.objective, 60), config.data, config.batch, Group()).step(0)
    total = sum(micro.batch.target_ids_N.numel() for micro in step.micro_batches)
    assert step.targets == total == 8 * 24
    mean = torch.tensor([m.candidates[0].ids_U.numel() for m in step.micro_batches]).float().mean()  # type: ignore[union-attr]
    assert step.candidates == pytest.approx(mean.item())


def test_half_precision_on_a_cpu_has_candidates_of_few_numbers(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    reading = (
        ConcatenatedSamples(IndexedDataset(config.data.train), 24, config.seed),
        build_objective(config.objective, 60),
    )
    plain, half = (
        StepLoader(*reading, config.data, config.batch, Group(), half_precision=half).step(0) for half in (False, True)
    )
    assert {len(micro.candidates[0].ids_U) for micro in half.micro_batches} == {128}  # type: ignore[arg-type]
    assert half.candidates == plain.candidates < 60  # as they are told
