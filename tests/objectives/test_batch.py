"""The values that are made of a batch for the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megahead.data.batch import Batch, SubsetIndex
from megahead.losses.candidates import Candidates
from megahead.objectives.micro_batch import (
    MicroBatch,
    documents_of,
    target_positions_of,
    token_subsets_of,
    with_cu_seqlens,
)

BATCH = Batch(
    torch.zeros(2, 4, dtype=torch.int64),
    torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]),
    torch.tensor([0, 2, 7]),
    torch.tensor([5, 6, 7]),
    max_targets_per_row=2,
)


def test_documents_have_the_batchs_positions_and_what_is_known_of_them() -> None:
    assert BATCH.positions_BT is not None
    documents = documents_of(BATCH)
    assert documents.positions_BT is BATCH.positions_BT
    assert documents.cu_seqlens.tolist() == [0, 2, 4, 8]
    known = torch.tensor([0, 2, 4, 8], dtype=torch.int32)
    assert documents_of(replace(BATCH, cu_seqlens=known)).cu_seqlens is known


def test_rows_without_positions_are_documents() -> None:
    documents = documents_of(replace(BATCH, positions_BT=None))
    assert documents.one_per_row
    assert documents.positions_BT.tolist() == [[0, 1, 2, 3]]
    assert documents.cu_seqlens.tolist() == [0, 4, 8]


def test_ids_are_those_of_inputs_and_candidates() -> None:
    batch = replace(BATCH, input_ids_BT=torch.arange(8).reshape(2, 4))
    groups = [Candidates(torch.tensor(ids), None, torch.zeros(1, dtype=torch.int64)) for ids in ([20, 21], [30])]
    ids = MicroBatch(batch, (*groups, replace(groups[0], ids_U=None)), 1.0).ids()
    assert ids.tolist() == [*range(8), 20, 21, 30]


def test_targets_are_those_of_the_batch() -> None:
    targets = target_positions_of(BATCH)
    assert targets.index_N is BATCH.target_index_N
    assert (targets.rows, targets.row_length, targets.slots_per_row) == (2, 4, 2)
    assert target_positions_of(replace(BATCH, max_targets_per_row=None)).slots_per_row == 4


def test_a_packed_batch_is_the_same_in_one_buffer_wherever_it_is() -> None:
    """Of every dtype, shape and nesting, also without elements."""
    auxiliary = {"a": (torch.tensor(2.5, dtype=torch.float64), [torch.zeros(0, 3), torch.tensor([True, False, True])])}
    selection = SubsetIndex(torch.tensor([0, 3]), 1, range(1), cu_seqlens=torch.tensor([0, 1], dtype=torch.int32))
    batch = replace(BATCH, token_subsets=(selection,), auxiliary=auxiliary, weight_N=torch.rand(3))
    groups = tuple(Candidates(torch.arange(5 - k), torch.rand(5 - k), torch.tensor([k])) for k in range(2))
    micro = MicroBatch(batch, groups, 0.5)
    packed = micro.pack()
    assert packed.buffer is not None
    moved = packed.to(torch.device("cpu"))
    again = replace(packed, buffer=packed.buffer.clone()).to(torch.device("cpu"))
    for copy in (packed, moved, again):
        assert (copy.loss_weight, copy.auxiliary_weight) == (0.5, None)
        expected, found = (tree_leaves([vars(m.batch), *map(vars, m.candidates)]) for m in (micro, copy))
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            if not torch.is_tensor(one):
                assert one == other
                continue
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)
            assert not other.numel() or other.untyped_storage().data_ptr() == copy.buffer.data_ptr()


KEPT = SubsetIndex(torch.tensor([0, 1, 3, 4, 5, 6]), max_per_row=3, layers=range(1))
"""Of the first row the third token comes late, of the second the fourth."""


@pytest.mark.parametrize(("packed", "known", "shorter"), [(True, [0, 2, 4, 8], [0, 2, 3, 6]), (False, None, [0, 3, 6])])
def test_where_documents_begin_is_known_before_the_batch_is_on_a_device_also_in_shorter_rows(
    packed: bool, known: list[int] | None, shorter: list[int]
) -> None:
    batch = replace(BATCH, token_subsets=(KEPT,), positions_BT=BATCH.positions_BT if packed else None)
    found = with_cu_seqlens(batch, 1).to("meta")
    for mine, expected in ((found.cu_seqlens, known), (found.token_subsets[0].cu_seqlens, shorter)):
        assert (mine is None) == (expected is None)
        assert mine is None or len(mine) == len(expected)
    (late,) = token_subsets_of(found)
    boundaries = late.select_documents(documents_of(found)).cu_seqlens  # on `meta` none could be looked for
    assert len(boundaries) == len(shorter)
    assert with_cu_seqlens(batch, 1).token_subsets[0].cu_seqlens.tolist() == shorter
    assert len(with_cu_seqlens(batch, 8).token_subsets[0].cu_seqlens) == 8
