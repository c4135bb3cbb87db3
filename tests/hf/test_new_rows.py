"""How rows of new tokens begin."""

from __future__ import annotations

import torch

from megahead.commands.convert import METHODS as COMMAND_METHODS
from megahead.hf.revocabulary import METHODS, mean_rows, random_rows, rarity_rows

TABLE = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
PIECES = [[3], [4, 9, 4], [], [1, 2]]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_a_mean_is_that_of_the_pieces_exact_to_its_format() -> None:
    rows = mean_rows(TABLE, PIECES, None, generator())
    assert torch.equal(rows[0], TABLE[3])
    assert torch.equal(rows[1], ((2 * TABLE[4].double() + TABLE[9].double()) / 3).float())
    assert torch.equal(rows[3], TABLE[1:3].double().mean(0).float())
    assert torch.equal(rows[2], random_rows(TABLE, PIECES, None, generator())[2])


def test_rare_pieces_weigh_more_where_asked() -> None:
    counts = torch.zeros(50, dtype=torch.int64)
    counts[1] = 10**9
    rows = rarity_rows(TABLE, PIECES, counts, generator())
    torch.testing.assert_close(rows[3], TABLE[2], rtol=0, atol=0.01)
    even = rarity_rows(TABLE, PIECES, torch.full((50,), 10**6), generator())
    torch.testing.assert_close(even, mean_rows(TABLE, PIECES, None, generator()))


def test_drawn_rows_have_the_tables_mean_and_deviation() -> None:
    table = TABLE * torch.arange(1, 9) + 5
    drawn = random_rows(table, [[]] * 20_000, None, generator())
    torch.testing.assert_close(drawn.mean(0), table.mean(0), rtol=0, atol=0.2)
    torch.testing.assert_close(drawn.std(0), table.std(0, correction=0), rtol=0.03, atol=0)


def test_the_command_tells_every_method() -> None:
    assert list(COMMAND_METHODS) == list(METHODS)
