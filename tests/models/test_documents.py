"""Documents of packed rows: read from positions that restart."""

from __future__ import annotations

import pytest
import torch

from megahead.models.documents import Documents

POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])


def test_boundaries_and_lengths_cover_all_tokens_in_order():
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


def test_boundaries_that_are_known_are_not_looked_for():
    cu_seqlens = torch.tensor([0, 3, 5, 6, 10], dtype=torch.int32)
    assert Documents(POSITIONS, cu_seqlens).cu_seqlens is cu_seqlens
    assert torch.equal(Documents(POSITIONS).cu_seqlens, cu_seqlens)


@pytest.mark.parametrize(("multiple", "length"), [(4, 8), (5, 5), (64, 64)])
def test_padded_boundaries_add_documents_without_tokens(multiple: int, length: int) -> None:
    padded = Documents(POSITIONS).padded_cu_seqlens(multiple)
    assert padded.tolist() == [0, 3, 5, 6, 10] + [10] * (length - 5)
    assert padded.dtype == torch.int32
    assert Documents(POSITIONS, padded).lengths == [3, 2, 1, 4]
    assert Documents.whole_rows(2, 5).padded_cu_seqlens(multiple).tolist() == [0, 5] + [10] * (-3 % multiple + 1)


def test_whole_rows_are_documents_without_a_mask_of_their_own():
    whole, spelled_out = Documents.whole_rows(3, 5), Documents(torch.arange(5).expand(3, 5))
    assert whole.one_per_row
    assert not spelled_out.one_per_row
    assert whole.cu_seqlens.tolist() == spelled_out.cu_seqlens.tolist() == [0, 5, 10, 15]
    assert whole.cu_seqlens.dtype == spelled_out.cu_seqlens.dtype
    assert whole.lengths == [5, 5, 5]
    assert torch.equal(whole.causal_mask_BTT.expand(3, 5, 5), spelled_out.causal_mask_BTT)
    assert torch.equal(whole.positions_BT.expand(3, 5), spelled_out.positions_BT)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_within_a_window_a_token_sees_its_document_to_both_sides_as_far_as_that(window: int) -> None:
    near = Documents(POSITIONS).with_window(window)
    for row, starts in enumerate([[0, 0, 0, 3, 3], [0, 1, 1, 1, 1]]):
        for one in range(5):
            seen = [starts[one] == starts[other] and abs(one - other) <= window for other in range(5)]
            assert near.mask_BTT[row, one].tolist() == seen
            assert near.causal_mask_BTT[row, one].tolist() == [see and other <= one for other, see in enumerate(seen)]
    assert near.cu_seqlens.tolist() == [0, 3, 5, 6, 10]


def test_rows_that_are_within_reach_need_no_mask_and_longer_ones_do() -> None:
    whole = Documents.whole_rows(2, 5)
    assert whole.with_window(4) is whole
    assert not whole.needs_mask
    assert whole.with_window(3).needs_mask
    assert whole.with_window(3).one_per_row
