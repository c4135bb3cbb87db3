from __future__ import annotations

import pytest
from rich.table import Table

from megahead.report.tables import terminal


@pytest.mark.parametrize(
    "text", ["runs/[bold]/a", "text that ends [/nothing]", "0.5 of [1, 2]", "a :car: on :100: roads"]
)
def test_brackets_and_emoji_codes_are_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(text, title=text)
    table.add_row(text)
    console = terminal(width=60)
    console.print(text)
    console.print(table)
    assert capsys.readouterr().out.count(text) == 4
