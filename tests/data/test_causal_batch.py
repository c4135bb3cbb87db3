"""What a decoder reads and predicts, against the definition written as loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from support.causal_rows import causal_batch

END = 0
rows_strategy = hnp.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(2, 12)), elements=st.integers(0, 3))


@given(rows_strategy, st.booleans(), st.booleans())
def test_equals_the_definition(rows: np.ndarray, isolate: bool, boundary: bool) -> None:
    batch = causal_batch(rows, end_token=END, isolate_documents=isolate, boundary_targets=boundary)
    positions, index, targets = [], [], []
    for row in rows.tolist():
        position = 0
        for token, following in pairwise(row):
            if boundary or token != END:
                index.append(len(positions))
                targets.append(following)
            positions.append(position)
            position = 0 if token == END else position + 1
    shape = (len(rows), rows.shape[1] - 1)
    assert torch.equal(batch.input_ids_BT, torch.tensor(rows[:, :-1]))
    assert batch.target_index_N.tolist() == index
    assert batch.target_ids_N.tolist() == targets
    whole = torch.arange(shape[1]).expand(shape)
    found = whole if batch.positions_BT is None else batch.positions_BT
    assert torch.equal(found, torch.tensor(positions).view(shape) if isolate else whole)
    assert {batch.input_ids_BT.dtype, batch.target_index_N.dtype, batch.target_ids_N.dtype} == {torch.int64}


def test_positions_are_left_out_where_rows_are_whole() -> None:
    one_document = np.array([[1, 2, 3, END, 4], [5, 6, 7, 8, 9]])  # the end token closes the row's last input
    settings = {"end_token": END, "boundary_targets": True}
    assert causal_batch(one_document, isolate_documents=True, **settings).positions_BT is None
    two_documents = np.array([[1, END, 3, 4, 5]])
    positions = causal_batch(two_documents, isolate_documents=True, **settings).positions_BT
    assert positions is not None
    assert positions.tolist() == [[0, 1, 0, 1]]
    assert causal_batch(two_documents, isolate_documents=False, **settings).positions_BT is None


def test_moves_as_a_whole() -> None:
    batch = causal_batch(np.array([[1, END, 3]]), end_token=END, isolate_documents=True, boundary_targets=False)
    moved = batch.to("meta")
    assert moved.input_ids_BT.is_meta
    assert moved.target_ids_N.is_meta
    assert moved.target_index_N.is_meta
    assert moved.positions_BT is None
