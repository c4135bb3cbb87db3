"""Documents of packed rows: read from positions that restart."""

from __future__ import annotations

import torch

from megahead.nn import Documents

POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])


def test_borders_and_lengths_cover_all_tokens_in_order():
    documents = Documents(POSITIONS)
    assert documents.lengths == [3, 2, 1, 4]
    assert documents.cu_seqlens.tolist() == [0, 3, 5, 6, 10]
    assert documents.cu_seqlens.dtype == torch.int32


def test_a_row_that_starts_inside_a_document_is_still_cut_from_the_row_before():
    documents = Documents(torch.tensor([[0, 1, 2], [7, 8, 0]]))
    assert documents.lengths == [3, 2, 1]


def test_the_callers_positions_stay_as_they_are():
    positions = torch.tensor([[4, 5, 0]])
    assert Documents(positions).lengths == [2, 1]
    assert positions.tolist() == [[4, 5, 0]]


def test_mask_shows_a_token_its_own_document_up_to_itself():
    expected = torch.zeros(2, 5, 5, dtype=torch.bool)
    for row, spans in enumerate([[(0, 3), (3, 5)], [(0, 1), (1, 5)]]):
        for start, end in spans:
            for i in range(start, end):
                expected[row, i, start : i + 1] = True
    assert torch.equal(Documents(POSITIONS).causal_mask_BTT, expected)


def test_borders_that_are_known_are_not_looked_for():
    cu_seqlens = torch.tensor([0, 3, 5, 6, 10], dtype=torch.int32)
    assert Documents(POSITIONS, cu_seqlens).cu_seqlens is cu_seqlens
    assert torch.equal(Documents(POSITIONS).cu_seqlens, cu_seqlens)


def test_borders_of_whole_rows():
    assert Documents.cu_seqlens_of_rows(3, 5, torch.device("cpu")).tolist() == [0, 5, 10, 15]
